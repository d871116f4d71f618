package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// run is one measurement.
type run struct {
	*kube.Cluster
	size
	program, kubeconfig, logs string
	tokens                    string // directory

	began    time.Time
	managers []*manager
	leader   *manager
	roots    *x509.CertPool
	fleet    fleet
	missed   []string
}

func (r *run) end() {
	for _, m := range r.managers {
		m.kill()
	}
	_ = os.RemoveAll(r.tokens)
}

// all measures everything, and reports whether the limits held.
func (r *run) all(ctx context.Context) (held bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	fmt.Printf("%d nodes, %d pods, %d of them on the mesh, %d ShardingConfigs, %d pods with shared limits\n\n", r.nodes, r.pods, r.labelled, r.configs, r.limited)
	fmt.Println("| step | time | CPU of the leader | its memory | to agents | from agents | notes |\n|---|--:|--:|--:|--:|--:|---|")
	for n := 1; n <= 2; n++ {
		m, err := r.startManager(ctx, n)
		if err != nil {
			return false, err
		}
		r.managers = append(r.managers, m)
		// The first leads: it writes the CA.
		if r.roots, err = r.managerRoots(ctx); err != nil {
			return false, err
		}
	}
	r.leader = r.managers[0]
	for _, step := range []struct {
		what string
		do   func(context.Context) (result, error)
	}{
		{"all objects are created", r.populated},
		{"all agents connect", r.connect},
		{"idle", r.idle},
		{"one ShardingConfig changes", r.changeOne},
		{"what concerns all pods changes", r.changeAll},
		{"counts of shared limits", r.share},
		{"the leader is killed", r.failover},
	} {
		r.say("%s", step.what)
		if err := r.measure(ctx, step.what, step.do); err != nil {
			return false, fmt.Errorf("%s: %w", step.what, err)
		}
	}
	for _, m := range r.missed {
		fmt.Println("MISSED:", m)
	}
	return len(r.missed) == 0, nil
}

// result is what a step took, and what else there is to say.
type result struct {
	took  time.Duration
	notes string
}

// measure prints a row for a step.
func (r *run) measure(ctx context.Context, what string, do func(context.Context) (result, error)) error {
	before := map[*manager]state{} // of all: the leader may be another one after the step
	for _, m := range r.managers {
		var err error
		if before[m], err = m.state(); err != nil {
			return err
		}
	}
	received, sent := r.fleet.received.Load(), r.fleet.sent.Load()
	got, err := do(ctx)
	if err != nil {
		return err
	}
	after, err := r.leader.state()
	if err != nil {
		return err
	}
	fmt.Printf("| %s | %.2f s | %.2f s, %.2f cores | %d MB | %.2f MB | %.2f MB | %s |\n", what, got.took.Seconds(),
		(after.cpu - before[r.leader].cpu).Seconds(), after.cores(before[r.leader]), after.resident/1e6,
		float64(r.fleet.received.Load()-received)/1e6, float64(r.fleet.sent.Load()-sent)/1e6, got.notes)
	return nil
}

func (r *run) populated(ctx context.Context) (result, error) {
	began := time.Now()
	err := r.populate(ctx)
	return result{took: time.Since(began)}, err
}

func (r *run) until(ctx context.Context, what string, done func() (seen string, ok bool)) error {
	return kube.UntilWithin(ctx, patience, what, func(context.Context) error {
		if seen, ok := done(); !ok {
			return fmt.Errorf("%s", seen)
		}
		return nil
	})
}

// connected waits until all agents have connected after a time, and have all policies.
func (r *run) connected(ctx context.Context, after time.Time) (last time.Time, err error) {
	err = r.until(ctx, "all agents to be in step", func() (string, bool) {
		n, at := r.fleet.synced.after(after)
		last = at
		return fmt.Sprintf("%d of %d", n, r.nodes), n == r.nodes
	})
	return last, err
}

func (r *run) connect(ctx context.Context) (result, error) {
	if err := r.makeAgents(ctx); err != nil {
		return result{}, err
	}
	if err := r.until(ctx, "the Service to have an endpoint", func() (string, bool) { return "it has none", r.fleet.leader.Load() != nil }); err != nil {
		return result{}, err
	}
	began := time.Now()
	r.fleet.start(ctx)
	last, err := r.connected(ctx, began)
	if err != nil {
		return result{}, err
	}
	return result{took: last.Sub(began)}, r.settle(ctx)
}

// settle waits until every configuration's status says that all its pods apply it.
func (r *run) settle(ctx context.Context) error {
	return kube.UntilWithin(ctx, patience, "all configurations to be applied", func(ctx context.Context) error {
		var all meshv1alpha1.ShardingConfigList
		if err := r.List(ctx, &all); err != nil {
			return err
		}
		waiting := 0
		for i := range all.Items {
			if !applied(&all.Items[i]) {
				waiting++
			}
		}
		if waiting > 0 {
			_ = kube.Sleep(ctx, time.Second)
			return fmt.Errorf("%d of %d are not", waiting, len(all.Items))
		}
		return nil
	})
}

func applied(c *meshv1alpha1.ShardingConfig) bool {
	s := c.Status
	return s.ObservedGeneration == c.Generation && s.Members > 0 && s.ReadyMembers == s.Members
}

func (r *run) idle(ctx context.Context) (result, error) {
	const length = 30 * time.Second
	return result{took: length}, kube.Sleep(ctx, length)
}

// changeOne adds a namespace to the limits of one configuration after another. The time is until its last pod
// has the policy by which it is applied, by the agents' clocks, which are that of this process.
func (r *run) changeOne(ctx context.Context) (result, error) {
	var took, status []time.Duration
	for i := range r.changes {
		ns := r.namespace(i * r.configs / r.changes)
		c := &meshv1alpha1.ShardingConfig{}
		if err := r.Get(ctx, client.ObjectKey{Namespace: ns, Name: "operator"}, c); err != nil {
			return result{}, err
		}
		before := c.DeepCopy()
		in := &c.Spec.Limits[0].Selector.MatchExpressions[0]
		in.Values = append(in.Values, ns+"-more")
		began := time.Now()
		if err := r.Patch(ctx, c, client.MergeFrom(before)); err != nil {
			return result{}, err
		}
		err := kube.UntilWithin(ctx, patience, "the change to be applied in "+ns, func(ctx context.Context) error {
			now := &meshv1alpha1.ShardingConfig{}
			if err := r.Get(ctx, client.ObjectKeyFromObject(c), now); err != nil {
				return err
			}
			if n, _ := r.fleet.of(ns).after(began); n < int(now.Status.Members) || !applied(now) {
				return fmt.Errorf("%d of %d pods have a new policy, and %d apply it", n, now.Status.Members, now.Status.ReadyMembers)
			}
			return nil
		})
		if err != nil {
			return result{}, err
		}
		status = append(status, time.Since(began))
		_, last := r.fleet.of(ns).after(began)
		took = append(took, last.Sub(began))
	}
	p99 := stats.Percentile(took, 0.99)
	if p99 > changeWithin {
		r.missed = append(r.missed, fmt.Sprintf("a change of one configuration takes %v, limit %v", p99, changeWithin))
	}
	return result{took: p99, notes: fmt.Sprintf("p99 of %d changes; p50 %.2f s; until the status says so p50 %.2f s, p99 %.2f s", len(took),
		stats.Percentile(took, 0.5).Seconds(), stats.Percentile(status, 0.5).Seconds(), stats.Percentile(status, 0.99).Seconds())}, nil
}

// changeAll names another address of the apiserver, which all agents must redirect.
func (r *run) changeAll(ctx context.Context) (result, error) {
	began := time.Now()
	cm := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: platform.ConfigMap},
		Data:       map[string]string{platform.Key: `apiserver: {addresses: ["203.0.113.1:6443"]}`},
	}
	if err := r.Create(ctx, cm); err != nil {
		return result{}, err
	}
	var last time.Time
	err := r.until(ctx, "all agents to have the address", func() (string, bool) {
		n, at := r.fleet.cluster.after(began)
		last = at
		return fmt.Sprintf("%d of %d", n, r.nodes), n == r.nodes
	})
	return result{took: last.Sub(began), notes: "an address of the apiserver"}, err
}

// share has all limited pods report their counts as often as busy agents do.
func (r *run) share(ctx context.Context) (result, error) {
	const rounds, every = 10, 2 * time.Second
	for n := range rounds {
		for _, a := range r.fleet.agents {
			a.count(uint64(n) * 100)
		}
		if err := kube.Sleep(ctx, every); err != nil {
			return result{}, err
		}
	}
	return result{took: rounds * every, notes: fmt.Sprintf("%d pods report every %v", r.limited, every)}, nil
}

// failover kills the leader, and waits until all agents have the policies of the other replica.
func (r *run) failover(ctx context.Context) (result, error) {
	reviews, err := r.reviews(ctx)
	if err != nil {
		return result{}, err
	}
	began := time.Now()
	r.leader.kill()
	r.managers, r.leader = r.managers[1:], r.managers[1]
	address := r.leader.address + ":8443"
	var led time.Time
	err = r.until(ctx, "the other replica to lead", func() (string, bool) {
		led = time.Now()
		at := r.fleet.leader.Load()
		return *at, *at == address
	})
	if err != nil {
		return result{}, err
	}
	last, err := r.connected(ctx, began)
	if err != nil {
		return result{}, err
	}
	after, err := r.reviews(ctx)
	if err != nil {
		return result{}, err
	}
	took := last.Sub(began)
	if took > failoverWithin {
		r.missed = append(r.missed, fmt.Sprintf("after a failover agents are in step in %v, limit %v", took, failoverWithin))
	}
	return result{took: took, notes: fmt.Sprintf("the other replica leads after %.1f s; %d TokenReviews", led.Sub(began).Seconds(), after-reviews)}, nil
}
