package capture

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
)

const (
	reviewRate    = 200 // reviews per second
	reviewRounds  = 2   // of which each kills, stops and replaces all agents
	reviewTenants = 6
	// calmCreates is how many creates must end between two disruptions.
	calmCreates = 400
	// maxCut bounds the creates that one killed agent cuts off: those under way on its node.
	maxCut = 16
	// minChecked is the share of the creates that must be made while their owner is known.
	minChecked = 0.5
)

// reviewing is the state of part reviews.
type reviewing struct {
	*suite
	site    *reviews.Site
	load    *reviews.Load
	judge   reviews.Checker
	tenants []string
	owners  map[string]string // versions by tenant
}

// reviews disrupts agents while the apiserver sends reviews to an operator with webhooks, and
// hands tenants over between its versions. No review may fail but those that a killed agent
// was answering, and none may be answered by a version that does not own the tenant, except
// while an agent is away.
func (s *suite) reviews(ctx context.Context) error {
	return s.reviewed(ctx, func(r *reviewing) error {
		begun := time.Now()
		r.load = r.site.Load(ctx, reviewRate/reviews.PerCreate, r.tenants...)
		err := r.disrupt(ctx)
		r.count(r.load.Stop(), time.Since(begun))
		return err
	})
}

// reviewed calls do while an operator with webhooks answers the reviews of its tenants.
func (s *suite) reviewed(ctx context.Context, do func(*reviewing) error) (err error) {
	r := &reviewing{suite: s, owners: map[string]string{}}
	home, err := s.CreatePodNamespace(ctx, "reviews")
	if err != nil {
		return err
	}
	r.site, err = reviews.Install(ctx, s.Cluster, home, harness.ProbeAccount)
	if r.site != nil {
		defer func() { err = errors.Join(err, r.remove(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return err
	}
	if err := r.own(ctx); err != nil {
		return err
	}
	return do(r)
}

// remove removes the operator. The parts that follow need no other root.
func (r *reviewing) remove(ctx context.Context) error {
	home := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.site.Home}}
	return errors.Join(r.site.Remove(ctx), r.Delete(ctx, home))
}

// own creates the tenants, and waits until each has an owner that answers its reviews.
func (r *reviewing) own(ctx context.Context) error {
	for i := range reviewTenants {
		tenant, err := r.CreateNamespace(ctx, "tenant")
		if err != nil {
			return err
		}
		r.tenants, r.owners[tenant] = append(r.tenants, tenant), []string{reviews.Next, reviews.Stable}[i%2]
		if err := r.site.Own(ctx, tenant, r.owners[tenant]); err != nil {
			return err
		}
	}
	if err := kube.InOrder(ctx, r.routed, r.site.AwaitSettled); err != nil {
		return err
	}
	for tenant, version := range r.owners {
		r.judge.Tenures = append(r.judge.Tenures, reviews.Tenure{Namespace: tenant, Version: version, From: time.Now()})
	}
	return nil
}

func (r *reviewing) routed(ctx context.Context) error { return r.site.AwaitRouted(ctx, r.owners) }

// calm waits until all reviews are routed, and some were without a disruption.
func (r *reviewing) calm(ctx context.Context) error {
	if err := r.routed(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, harness.Timeout)
	defer cancel()
	return r.load.Await(ctx, time.Now(), calmCreates)
}

// disrupt makes all disruptions, one after the other, and a handover after each.
func (r *reviewing) disrupt(ctx context.Context) error {
	for round := range reviewRounds {
		for i, d := range []struct {
			name string
			do   func(context.Context) error
		}{
			{"agents killed", r.onEachNode(r.kill)},
			{"agents stopped", r.onEachNode(r.stop)},
			{"agents upgraded", r.RestartAgents},
			{"certificate replaced", r.site.Rotate},
		} {
			start := time.Now()
			tenant := r.tenants[(round+i)%len(r.tenants)]
			if err := kube.InOrder(ctx, r.calm, d.do, r.calm); err != nil {
				return fmt.Errorf("%s: %w", d.name, err)
			}
			if err := r.handOver(ctx, tenant); err != nil {
				return fmt.Errorf("handing %s over after %s: %w", tenant, d.name, err)
			}
			r.Logf("  %s: %v", d.name, time.Since(start).Round(100*time.Millisecond))
		}
	}
	return r.calm(ctx)
}

// onEachNode returns a function that disrupts the agents of all nodes, one after the other. The
// agent of a node is away until its pods route reviews again.
func (r *reviewing) onEachNode(disrupt func(ctx context.Context, node, pid string) error) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, node := range r.Nodes {
			pid, err := r.AgentPID(ctx, node)
			if err != nil {
				return err
			}
			from := time.Now()
			err = errors.Join(disrupt(ctx, node, pid), r.routed(ctx))
			r.judge.Away = append(r.judge.Away, reviews.Window{From: from, To: time.Now()})
			if err != nil {
				return fmt.Errorf("%s: %w", node, err)
			}
		}
		return nil
	}
}

// kill kills an agent, and waits until another runs.
func (r *reviewing) kill(ctx context.Context, node, pid string) error {
	from := time.Now()
	_, err := r.NodeExec(ctx, node, "bash", "-c", `kill -KILL "$1" && while [ -e "/proc/$1" ]; do sleep 0.01; done`, "bash", pid)
	r.judge.Dying = append(r.judge.Dying, reviews.Window{From: from, To: time.Now()})
	if err != nil {
		return err
	}
	_, err = r.WaitAgentRestart(ctx, node, pid)
	return err
}

// stop stops an agent for a while.
func (r *reviewing) stop(ctx context.Context, node, pid string) error {
	before, err := r.site.Interruptions(ctx, node)
	if err != nil {
		return err
	}
	if _, err := r.Signal(ctx, node, pid, "STOP"); err != nil {
		return err
	}
	_ = kube.Sleep(ctx, stopFor) // the duration is part of the test
	if _, err := r.Signal(context.WithoutCancel(ctx), node, pid, "CONT"); err != nil {
		return err
	}
	return r.site.AwaitInterrupted(ctx, node, before)
}

// handOver gives a tenant to the other version. Its reviews are judged again once the handover
// has settled and all agents know the owner.
func (r *reviewing) handOver(ctx context.Context, tenant string) error {
	to := reviews.Next
	if r.owners[tenant] == to {
		to = reviews.Stable
	}
	for i := range r.judge.Tenures {
		if t := &r.judge.Tenures[i]; t.Namespace == tenant && t.To.IsZero() {
			t.To = time.Now()
		}
	}
	if err := r.site.Own(ctx, tenant, to); err != nil {
		return err
	}
	r.owners[tenant] = to
	if err := kube.InOrder(ctx, r.routed, r.site.AwaitSettled); err != nil {
		return err
	}
	r.judge.Tenures = append(r.judge.Tenures, reviews.Tenure{Namespace: tenant, Version: to, From: time.Now()})
	return nil
}

// count judges the outcomes of the load.
func (r *reviewing) count(outcomes []reviews.Outcome, took time.Duration) {
	v := r.judge.Check(outcomes)
	r.counts.reviewed = v
	kills := len(r.judge.Dying)
	for _, why := range doubts(v, len(outcomes), kills) {
		r.Doubt("reviews: %s", why)
	}
	r.Logf("  %.0f reviews/s: of %d creates %d were checked, and %d were cut off with %d killed agents",
		float64(v.Reviews)/took.Seconds(), len(outcomes), v.Checked, v.Cut, kills)
}

// doubts returns why a verdict proves less than it says.
func doubts(v reviews.Verdict, creates, kills int) (out []string) {
	if v.Checked == 0 || float64(v.Checked) < minChecked*float64(creates) {
		out = append(out, fmt.Sprintf("of %d creates only %d were made while their owner was known", creates, v.Checked))
	}
	if v.Cut > maxCut*kills {
		out = append(out, fmt.Sprintf("%d creates were cut off with %d killed agents", v.Cut, kills))
	}
	return out
}
