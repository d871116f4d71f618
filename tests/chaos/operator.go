package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	operatorDeploy = "tests/operators/tally/deploy/"
	operatorName   = "tally" // its StatefulSet, and its program
	operatorLock   = "tally-leader"

	tenants = 60 // namespaces with objects
	heavy   = 6  // every so many tenants has heavyBy objects, the others one
	heavyBy = 3

	// refresh is how often the operator writes onto each object: who still holds
	// one in its cache that is another shard's tries to write it within this time.
	refresh = "1s"
)

// settling is how long a change of shards may take: all pods of the operator may
// have to start, one after the other.
const settling = 3 * time.Minute

// operator is the test operator under a root, in a namespace of its own, while its
// objects are changed all the time.
type operator struct {
	*world
	part  string
	home  string
	begun mark
	write *writer

	restarts []time.Time // of the apiserver
}

// withOperator has the operator run under a root while do breaks or changes something, and
// judges what came of it.
func (w *world) withOperator(ctx context.Context, r *result, part string, spec meshv1alpha1.ShardingConfigSpec, do func(context.Context, *operator) error) error {
	o, err := w.operate(ctx, part, spec)
	if err == nil {
		err = do(ctx, o)
	}
	if o == nil {
		return err
	}
	return errors.Join(err, o.judge(ctx, r), o.end(ctx))
}

// operate starts the operator and waits until all shards work.
func (w *world) operate(ctx context.Context, part string, spec meshv1alpha1.ShardingConfigSpec) (*operator, error) {
	if err := w.ApplyPath(ctx, operatorDeploy+"crd.yaml"); err != nil {
		return nil, err
	}
	if err := w.makeTenants(ctx); err != nil {
		return nil, err
	}
	o, err := w.settle(ctx, part)
	if err != nil {
		return o, err
	}
	root := o.newRoot(spec)
	if err := w.create(ctx, root); err != nil {
		return o, err
	}
	// A pod made before would be nobody's member.
	err = w.until(ctx, "the manager to see the root", func(ctx context.Context) error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(root), root); err != nil {
			return err
		}
		if root.Status.ObservedGeneration < root.Generation {
			return errors.New("it has not")
		}
		return nil
	})
	if err != nil {
		return o, err
	}
	set, err := w.statefulSet(o.home, replicasOf(spec.Root))
	if err != nil {
		return o, err
	}
	if err := w.create(ctx, set); err != nil {
		return o, err
	}
	if err := o.settled(ctx); err != nil {
		return o, err
	}
	o.write = w.startWriter(o.home)
	return o, nil
}

// settle makes a namespace for the operator, without anything of it.
func (w *world) settle(ctx context.Context, part string) (*operator, error) {
	begun, err := w.mark()
	if err != nil {
		return nil, err
	}
	home, err := w.home(ctx, part)
	if err != nil {
		return nil, err
	}
	return &operator{world: w, part: part, home: home, begun: begun}, w.letWeigh(ctx, home)
}

// newRoot returns the operator's root with a spec that says how it is divided.
func (o *operator) newRoot(spec meshv1alpha1.ShardingConfigSpec) *meshv1alpha1.ShardingConfig {
	spec = *spec.DeepCopy()
	spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: operatorLock}
	spec.Root.Prefix = operatorName
	spec.Root.TargetRef = &meshv1alpha1.TargetRef{Kind: "StatefulSet", Name: operatorName}
	spec.Root.ResourceSelector = []meshv1alpha1.ObjectLimiter{{
		RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}}},
	}}
	return &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: operatorName}, Spec: spec}
}

// statefulSet is the operator's, unmodified but for where it runs and how often it writes.
func (w *world) statefulSet(home string, replicas int32) (*appsv1.StatefulSet, error) {
	text, err := os.ReadFile(filepath.Join(w.Root, operatorDeploy, "statefulset.yaml"))
	if err != nil {
		return nil, fmt.Errorf("reading the operator's manifest: %w", err)
	}
	set := &appsv1.StatefulSet{}
	if err := yaml.UnmarshalStrict(text, set); err != nil {
		return nil, fmt.Errorf("reading the operator's manifest: %w", err)
	}
	set.Namespace, set.Spec.Replicas = home, &replicas
	pod := &set.Spec.Template.Spec
	pod.ServiceAccountName = probeAccount
	pod.Containers[0].Args = append(pod.Containers[0].Args, "-refresh="+refresh)
	if w.class != "" {
		pod.Containers[0].Args = append(pod.Containers[0].Args, "-selector="+classLabel+"="+w.class)
	}
	return set, nil
}

// letWeigh lets the manager count the objects, as long as a namespace is there.
func (w *world) letWeigh(ctx context.Context, home string) error {
	var ns corev1.Namespace
	if err := w.Get(ctx, client.ObjectKey{Name: home}, &ns); err != nil {
		return fmt.Errorf("reading namespace %s: %w", home, err)
	}
	return w.create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{
			Name: home, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: ns.Name, UID: ns.UID}},
			Labels: map[string]string{meshv1alpha1.GroupName + "/aggregate-to-stamp": "true"},
		},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}, Verbs: []string{"list"}}},
	})
}

// classLabel separates the objects of operators that run at the same time.
const classLabel = "class"

// ofClass are the labels of the objects that the operator looks after; none for all.
func (w *world) ofClass() client.MatchingLabels {
	if w.class == "" {
		return nil
	}
	return client.MatchingLabels{classLabel: w.class}
}

// makeTenants makes what the operator looks after, once in a run.
func (w *world) makeTenants(ctx context.Context) error {
	if w.tenants != nil {
		return nil
	}
	if err := w.removeTallies(ctx); err != nil {
		return err
	}
	return w.addTenants(ctx, "chaos-tenant-%02d", tenants)
}

// addTenants makes so many namespaces with objects.
func (w *world) addTenants(ctx context.Context, format string, n int) error {
	for i := range n {
		name := fmt.Sprintf(format, i)
		if err := w.create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ours}}); err != nil {
			return err
		}
		objects := 1
		if i%heavy == 0 {
			objects = heavyBy
		}
		if err := w.makeTallies(ctx, name, objects); err != nil {
			return err
		}
		w.tenants = append(w.tenants, name)
	}
	return nil
}

// removeTallies removes the objects that something else left, such as make demo. They
// would fill the operator's queue, and weigh on its shards.
func (w *world) removeTallies(ctx context.Context) error {
	return w.until(ctx, "the objects of others to be removed", func(ctx context.Context) error {
		var left tallyv1.TallyList
		if err := w.List(ctx, &left); err != nil {
			return err
		}
		if len(left.Items) == 0 {
			return nil
		}
		w.say("  removing %d objects that something else left", len(left.Items))
		cleared := map[string]bool{}
		for _, t := range left.Items {
			if cleared[t.Namespace] {
				continue
			}
			if err := w.DeleteAllOf(ctx, &tallyv1.Tally{}, client.InNamespace(t.Namespace)); err != nil {
				return fmt.Errorf("removing the objects in %s: %w", t.Namespace, err)
			}
			cleared[t.Namespace] = true
		}
		return fmt.Errorf("there were %d", len(left.Items))
	})
}

func (w *world) makeTallies(ctx context.Context, namespace string, n int) error {
	for range n {
		if err := w.create(ctx, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "t-", Labels: w.ofClass()}}); err != nil {
			return err
		}
	}
	return nil
}

// replicasOf is how many pods a root means.
func replicasOf(root *meshv1alpha1.RootConfig) (n int32) {
	if root.Canary != nil {
		n += *root.Canary.Replicas
	}
	return n + root.Auto.ShardingSize*root.Auto.EveryShardReplicas
}

// shardsOf is how many shards a root means.
func shardsOf(root *meshv1alpha1.RootConfig) int {
	n := int(root.Auto.ShardingSize)
	if root.Canary != nil {
		n++
	}
	return n
}

func (o *operator) root(ctx context.Context) (*meshv1alpha1.ShardingConfig, error) {
	root := &meshv1alpha1.ShardingConfig{}
	if err := o.Get(ctx, client.ObjectKey{Namespace: o.home, Name: operatorName}, root); err != nil {
		return nil, fmt.Errorf("reading the root: %w", err)
	}
	return root, nil
}

// change changes the root, and the number of pods if it means another. An apiserver
// that is away is waited for.
func (o *operator) change(ctx context.Context, edit func(*meshv1alpha1.ShardingConfigSpec)) error {
	return o.until(ctx, "the root to be changed", func(ctx context.Context) error {
		return retry.RetryOnConflict(retry.DefaultRetry, func() error {
			root, err := o.root(ctx)
			if err != nil {
				return err
			}
			edit(&root.Spec)
			if err := o.Update(ctx, root); err != nil {
				return err
			}
			set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: operatorName}}
			scale := &autoscalingv1.Scale{ObjectMeta: set.ObjectMeta, Spec: autoscalingv1.ScaleSpec{Replicas: replicasOf(root.Spec.Root)}}
			return o.SubResource("scale").Update(ctx, set, client.WithSubResourceBody(scale))
		})
	})
}

// settled waits until nothing is moved any more and all shards have members that work.
func (o *operator) settled(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settling)
	defer cancel()
	return kube.Until(ctx, "the shards to settle", o.settledNow)
}

// settledNow says what is missing for that.
func (o *operator) settledNow(ctx context.Context) error {
	root, err := o.root(ctx)
	if err != nil {
		return err
	}
	s := root.Status.Root
	switch {
	case root.Status.ObservedGeneration != root.Generation || s == nil:
		return errors.New("the manager has not seen the root")
	case s.Handover != "Settled":
		return fmt.Errorf("%s: %s", s.Handover, moves(s))
	case len(s.Shards) != shardsOf(root.Spec.Root):
		return fmt.Errorf("there are %d shards of %d", len(s.Shards), shardsOf(root.Spec.Root))
	}
	for _, shard := range s.Shards {
		if shard.ReadyMembers == 0 || shard.ReadyMembers < shard.Members {
			return fmt.Errorf("%s has %d members, %d ready", shard.Name, shard.Members, shard.ReadyMembers)
		}
	}
	if orphans, err := o.orphans(s); err != nil || len(orphans) > 0 {
		return errors.Join(err, fmt.Errorf("nobody holds %d tenants", len(orphans)))
	}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: operatorName}}
	return o.RolledOut(ctx, set)
}

// moves tells of those under way.
func moves(s *meshv1alpha1.RootStatus) (out []string) {
	for _, h := range s.Handovers {
		out = append(out, fmt.Sprintf("%s to %s %s, waits for %v", h.From, h.To, h.Phase, h.WaitsFor))
	}
	return out
}

// holders are the shards that hold tenants, with these.
func (o *operator) holders(s *meshv1alpha1.RootStatus) (map[string][]string, error) {
	out := map[string][]string{}
	for _, shard := range s.Shards {
		held, err := sharding.Parse(shard.Held)
		if err != nil {
			return nil, fmt.Errorf("reading what %s holds: %w", shard.Name, err)
		}
		for _, t := range o.tenants {
			if held.Owns(t) {
				out[shard.Name] = append(out[shard.Name], t)
			}
		}
	}
	return out, nil
}

// orphans are the tenants that no shard with a ready member holds.
func (o *operator) orphans(s *meshv1alpha1.RootStatus) ([]string, error) {
	holders, err := o.holders(s)
	if err != nil {
		return nil, err
	}
	var owned, out []string
	for _, shard := range s.Shards {
		if shard.ReadyMembers > 0 {
			owned = append(owned, holders[shard.Name]...)
		}
	}
	for _, t := range o.tenants {
		if !slices.Contains(owned, t) {
			out = append(out, t)
		}
	}
	return out, nil
}

// pods are those of the operator that are to stay.
func (o *operator) pods(ctx context.Context) ([]corev1.Pod, error) {
	var list corev1.PodList
	if err := o.List(ctx, &list, client.InNamespace(o.home), client.MatchingLabels{"app": operatorName}); err != nil {
		return nil, fmt.Errorf("listing the operator's pods: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }), nil
}

// end removes the operator. That a root goes is a handover, too.
func (o *operator) end(ctx context.Context) error {
	root := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: o.home, Name: operatorName}}
	set := &appsv1.StatefulSet{ObjectMeta: root.ObjectMeta}
	for _, obj := range []client.Object{set, root} {
		if err := o.Delete(ctx, obj); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing the operator: %w", err)
		}
	}
	err := o.until(ctx, "the operator's end", func(ctx context.Context) error {
		pods, err := o.pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) > 0 {
			return fmt.Errorf("%d pods are left", len(pods))
		}
		if err := o.Get(ctx, client.ObjectKeyFromObject(root), root); client.IgnoreNotFound(err) != nil {
			return err
		} else if err == nil {
			return errors.New("its root is left")
		}
		return nil
	})
	return errors.Join(err, client.IgnoreNotFound(o.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.home}})))
}

// evidence is what the audit log has of the operator: what its shards held, and all that it wrote.
func (o *operator) evidence() ([]audit.State, []audit.Request, error) {
	f, err := o.since(o.begun)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = f.Close() }()
	states, err := audit.States(f, types.NamespacedName{Namespace: o.home, Name: operatorName}, o.begun.at)
	if err != nil {
		return nil, nil, err
	}
	g, err := o.since(o.begun)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = g.Close() }()
	requests, err := audit.Requests(g, audit.Callers{Users: []string{audit.ServiceAccount(o.home, probeAccount)}, Since: o.begun.at})
	return states, slices.DeleteFunc(requests, func(r audit.Request) bool {
		return !r.Writes() || r.Group != tallyv1.GroupVersion.Group
	}), err
}

// judge stops the changes and counts what the part came to.
func (o *operator) judge(ctx context.Context, r *result) error {
	c := &r.sharding
	o.judgeWaits(ctx, r)
	root, err := o.root(ctx)
	if err != nil {
		return err
	}
	if root.Status.Root != nil {
		orphans, err := o.orphans(root.Status.Root)
		if err != nil {
			return err
		}
		c.orphans += len(orphans)
		if len(orphans) > 0 {
			o.say("  ! nobody holds %d tenants: %s, for one", len(orphans), orphans[0])
		}
	}
	states, writes, err := o.evidence()
	if err != nil {
		return err
	}
	j := audit.Judge(states, writes, o.restarts)
	c.doubleWrites += len(j.Foreign) + len(j.Shared)
	o.complain(j)
	if len(j.Unknown) > 0 {
		r.doubt("%s: %d writes are by pods of no shard: %s", o.part, len(j.Unknown), j.Unknown[0])
	}
	if len(states) == 0 || len(writes) == 0 {
		r.doubt("%s: the audit log has %d states and %d writes: is its policy that of tests/cluster?", o.part, len(states), len(writes))
	}
	moved := audit.Handovers(states)
	var took []time.Duration
	for _, h := range moved {
		took = append(took, h.Took())
	}
	c.handovers += len(moved)
	if undisturbed(o.part) {
		c.took = append(c.took, took...)
	}
	o.say("  %d handovers, half of them in %v, the slowest took %v; %d writes, %d in what was another's", len(moved),
		percentile(took, 0.5).Round(time.Millisecond), percentile(took, 1).Round(time.Millisecond), j.Writes, len(j.Foreign))
	return nil
}

// complain shows some of what a judgement found.
func (o *operator) complain(j audit.Judgement) {
	for _, f := range j.Foreign[:min(5, len(j.Foreign))] {
		o.say("  ! %s", f)
	}
	for _, s := range j.Shared[:min(3, len(j.Shared))] {
		o.say("  ! %s", s)
	}
}

// judgeWaits stops the changes and counts the objects that were not reconciled, or
// only after too long.
func (o *operator) judgeWaits(ctx context.Context, r *result) {
	c := &r.sharding
	if o.write == nil {
		return
	}
	lost, long, starved, err := o.write.finish(ctx)
	r.doubtErr(o.part, err)
	c.lost += len(lost)
	c.orphans += len(long)
	for _, t := range lost[:min(3, len(lost))] {
		o.say("  ! %s", t)
	}
	for _, t := range long[:min(3, len(long))] {
		o.say("  ! %s", t)
	}
	if len(starved) > 0 {
		r.doubt("%s: the operator was too slow to tell: %d objects that the mesh showed it starved in its queue: %s", o.part, len(starved), starved[0])
	}
}
