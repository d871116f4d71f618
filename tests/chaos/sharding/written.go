package sharding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	writtenSeed    = 18
	writtenFor     = 5 * time.Minute
	writtenTenants = 12
	writtenPods    = 2 // of each shard
	writtenCalm    = 20 * time.Second
	// moveWithin is how long after a change the next one begins at the latest, if it does not wait for
	// the end of the handover.
	moveWithin = 10 * time.Second
	// writtenWait is how long an object may wait: several changes, and a disruption during each.
	writtenWait = 3 * time.Minute
)

// writtenShards are the hand-written shards, each of which has a StatefulSet.
var writtenShards = []string{"a", "b"}

// written moves tenants between two hand-written shards, often before the last change has ended,
// while pods, agents and managers are killed.
func (s *suite) written(ctx context.Context) error {
	if err := s.ApplyCRD(ctx); err != nil {
		return err
	}
	o, err := s.prepare(ctx, "written", writtenTenants)
	if err != nil {
		return err
	}
	w := &written{shardedOperator: o, owners: map[string]string{}, changes: map[string][]change{}}
	err = kube.InOrder(ctx, w.start, w.disturbed, w.settled, w.calm)
	w.CheckWaits(ctx)
	return errors.Join(err, w.judge(), w.Remove(context.WithoutCancel(ctx)), w.removeTenants(context.WithoutCancel(ctx)))
}

// written is the state of the part.
type written struct {
	*shardedOperator
	owners  map[string]string   // shard of each tenant that one has, by the latest specs
	changes map[string][]change // of each tenant, in order
}

// change gives a tenant to a shard.
type change struct {
	to   string
	at   time.Time // before it was written
	over time.Time // when the shard owned it; zero if another change came before
}

// start creates the shards, each with half of the tenants.
func (w *written) start(ctx context.Context) error {
	for i, tenant := range w.Tenants.Names {
		w.owners[tenant] = writtenShards[i%len(writtenShards)]
		w.changes[tenant] = []change{{to: w.owners[tenant], at: time.Now()}}
	}
	for _, shard := range writtenShards {
		if err := w.CreateAll(ctx, w.config(shard)); err != nil {
			return err
		}
		err := w.CreateStatefulSet(ctx, writtenPods, func(set *appsv1.StatefulSet) {
			set.Name = shard
			set.Spec.Selector.MatchLabels["shard"], set.Spec.Template.Labels["shard"] = shard, shard
		})
		if err != nil {
			return err
		}
	}
	if err := w.settled(ctx); err != nil {
		return err
	}
	w.StartWriter()
	w.Writer.MaxWait = writtenWait
	return nil
}

// config returns the configuration of a shard with its present tenants.
func (w *written) config(shard string) *meshv1alpha1.ShardingConfig {
	var tenants []string
	for tenant, owner := range w.owners {
		if owner == shard {
			tenants = append(tenants, tenant)
		}
	}
	slices.Sort(tenants)
	if tenants == nil {
		tenants = []string{"none"} // an empty selector would select all
	}
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.Home, Name: shard},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector:   &metav1.LabelSelector{MatchLabels: map[string]string{"shard": shard}},
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: operator.Lock},
			Limits: []meshv1alpha1.ObjectLimiter{{
				RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}}},
				Selector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{
					Key: meshv1alpha1.NamespaceLabel, Operator: metav1.LabelSelectorOpIn, Values: tenants,
				}}},
			}},
		},
	}
}

// disturbed moves tenants while the operator and the mesh are disturbed.
func (w *written) disturbed(ctx context.Context) error {
	random := rand.New(rand.NewPCG(writtenSeed, 1))
	return beside(ctx, writtenFor, func(disturbing context.Context) error {
		for disturbing.Err() == nil {
			if err := w.move(ctx, random); err != nil {
				return err
			}
			if random.IntN(2) == 0 {
				if err := w.settled(ctx); err != nil {
					return err
				}
				continue
			}
			_ = kube.Sleep(disturbing, time.Duration(random.Int64N(int64(moveWithin))))
		}
		return nil
	}, func(ctx context.Context) error {
		return disruptAll(ctx, writtenSeed, disruptEvery, siteDisruptions, []*shardedOperator{w.shardedOperator})
	})
}

// move moves some tenants: first no shard has them, because admission refuses two, and then the other
// one. The shards are written in either order. Sometimes one of them is deleted and created anew.
func (w *written) move(ctx context.Context, random *rand.Rand) error {
	moving := map[string]string{} // to which shard
	for _, i := range random.Perm(len(w.Tenants.Names))[:1+random.IntN(writtenTenants/2)] {
		tenant := w.Tenants.Names[i]
		moving[tenant] = writtenShards[0]
		if w.owners[tenant] == writtenShards[0] {
			moving[tenant] = writtenShards[1]
		}
		delete(w.owners, tenant)
	}
	if err := w.writeAll(ctx, random, -1); err != nil {
		return err
	}
	for tenant, to := range moving {
		w.owners[tenant] = to
		w.changes[tenant] = append(w.changes[tenant], change{to: to, at: time.Now()})
	}
	w.counts.moves += len(moving)
	return w.writeAll(ctx, random, random.IntN(16))
}

// writeAll writes the shards in any order. anew is the index of the one that is created anew, if there is
// one.
func (w *written) writeAll(ctx context.Context, random *rand.Rand, anew int) error {
	for _, i := range random.Perm(len(writtenShards)) {
		if err := w.write(ctx, w.config(writtenShards[i]), i == anew); err != nil {
			return err
		}
	}
	return nil
}

// write writes a configuration, or deletes it and creates it anew.
func (w *written) write(ctx context.Context, config *meshv1alpha1.ShardingConfig, anew bool) error {
	deleted := false
	return w.Until(ctx, "the shard to be changed", func(ctx context.Context) error {
		is := config.DeepCopy()
		err := w.Get(ctx, client.ObjectKeyFromObject(config), is)
		switch {
		case client.IgnoreNotFound(err) != nil:
			return err
		case err != nil:
			return w.Create(ctx, config.DeepCopy())
		case is.DeletionTimestamp != nil:
			return errors.New("it is not deleted yet")
		case anew && !deleted:
			deleted = true
			w.Logf("  written: shard %s is created anew", config.Name)
			return cmp.Or(w.Delete(ctx, is), errors.New("it is to be created anew"))
		}
		is.Spec = config.Spec
		return w.Update(ctx, is)
	})
}

// calm lets objects change without disturbances. An operator repeats what was refused again and again
// ever later, in the end after minutes, but reconciles an object that has changed at once.
func (w *written) calm(ctx context.Context) error { return kube.Sleep(ctx, writtenCalm) }

// settled waits until both shards own their tenants.
func (w *written) settled(ctx context.Context) error {
	err := kube.UntilWithin(ctx, operator.SettleTimeout, "the hand-written shards", func(ctx context.Context) error {
		for _, shard := range writtenShards {
			config := &meshv1alpha1.ShardingConfig{}
			if err := w.Get(ctx, client.ObjectKey{Namespace: w.Home, Name: shard}, config); err != nil {
				return err
			}
			ready := meta.FindStatusCondition(config.Status.Conditions, meshv1alpha1.ConditionReady)
			if ready == nil || ready.ObservedGeneration != config.Generation || ready.Status != metav1.ConditionTrue || config.Status.ReadyMembers != writtenPods {
				return fmt.Errorf("%s has %d ready members: %s", shard, config.Status.ReadyMembers, kube.ReadyMessage(config))
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, changes := range w.changes {
		if last := &changes[len(changes)-1]; last.over.IsZero() {
			last.over = time.Now()
		}
	}
	return nil
}

// judge counts the writes of tenants that belonged to the other shard, by the audit log.
func (w *written) judge() error {
	_, writes, err := w.Evidence()
	if err != nil {
		return failure.Wrap(err, "reading the writes of the shards")
	}
	byTenant := map[string][]audit.Request{}
	for _, r := range writes {
		byTenant[r.Namespace] = append(byTenant[r.Namespace], r)
	}
	var found []string
	for tenant, changes := range w.changes {
		if len(byTenant[tenant]) == 0 {
			w.Result.Doubt("%s: the audit log has no write in %s", w.Part, tenant)
		}
		found = append(found, outOfTurn(changes, byTenant[tenant], w.shardOf)...)
	}
	w.Counts.DoubleWrites += len(found)
	harness.LogSome(w.Testbed, 5, "  ! %s", found)
	w.Logf("  written: %d moves, %d writes, %d of them out of turn", w.counts.moves, len(writes), len(found))
	return nil
}

// shardOf returns the shard of the pod that sent a request.
func (w *written) shardOf(r audit.Request) string {
	set, _, _ := strings.Cut(strings.TrimPrefix(r.Pod, w.Home+"/"), "-")
	return set
}

// outOfTurn returns the writes in a tenant by shards that could not own it: another one owned it, or
// had a write under way. Several changes may have ended as one, so that a shard owns the tenant
// throughout.
func outOfTurn(changes []change, writes []audit.Request, shardOf func(audit.Request) string) (out []string) {
	slices.SortFunc(writes, func(a, b audit.Request) int { return a.Received.Compare(b.Received) })
	owner, next := "", 0 // the next change that the tenant may follow
	ended := map[string]time.Time{}
	for _, w := range writes {
		shard := shardOf(w)
		for i := next; i < len(changes); i++ {
			if over := changes[i].over; !over.IsZero() && over.Before(w.Received) {
				owner, next = changes[i].to, i+1
			}
		}
		if shard != owner {
			i := next + slices.IndexFunc(changes[next:], func(c change) bool { return c.to == shard && c.at.Before(w.Received) })
			if i < next {
				out = append(out, fmt.Sprintf("not owned by %s: %s", shard, w))
				continue
			}
			owner, next = shard, i+1
		}
		for other, end := range ended {
			if other != shard && w.Received.Before(end) {
				out = append(out, fmt.Sprintf("while %s had a write under way: %s", other, w))
			}
		}
		if end := w.End(); end.After(ended[shard]) {
			ended[shard] = end
		}
	}
	return out
}
