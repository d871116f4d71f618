package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	deploy   = "tests/operators/tally/deploy/"
	operator = "operator-demo" // its namespace
	workload = "tally"         // its StatefulSet, ServiceAccount and pods' label "app"
	lock     = "tally-leader"

	shards = 2
)

// play makes everything and waits until the operator has done its work. It returns
// the time from which its requests count, zero if there is nothing to count.
func (d *demo) play(ctx context.Context) (since time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()

	if d.sharded {
		d.say("waiting for ctrlmesh to be ready")
		if err := d.meshReady(ctx); err != nil {
			return since, err
		}
	}
	for _, file := range []string{"namespace.yaml", "crd.yaml", "rbac.yaml"} {
		if err := d.ApplyPath(ctx, deploy+file); err != nil {
			return since, err
		}
	}
	d.say("clearing what an earlier run left")
	if err := d.clear(ctx); err != nil {
		return since, err
	}
	names := d.namespaceNames()
	d.say("making %d namespaces and the first half of %d objects", len(names), d.objects)
	if err := d.makeNamespaces(ctx, names); err != nil {
		return since, err
	}
	if err := d.makeObjects(ctx, names, 0, d.objects/2); err != nil {
		return since, err
	}
	if d.sharded {
		d.say("making %d ShardingConfigs", shards)
		if err := d.makeShards(ctx, names); err != nil {
			return since, err
		}
	}

	since = time.Now()
	d.say("starting the operator, two pods on two nodes")
	if err := d.ApplyPath(ctx, deploy+"statefulset.yaml"); err != nil {
		return since, err
	}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: operator, Name: workload}}
	if err := kube.Until(ctx, "the operator's pods", func(ctx context.Context) error { return d.RolledOut(ctx, set) }); err != nil {
		return since, err
	}
	if d.sharded {
		d.say("waiting for a leader of each shard")
		if err := kube.Until(ctx, "leaders", d.led); err != nil {
			return since, err
		}
	}
	d.say("making the other half of the objects")
	if err := d.makeObjects(ctx, names, d.objects/2, d.objects); err != nil {
		return since, err
	}
	d.say("waiting until every object is reconciled, and nobody writes any more")
	if err := kube.Until(ctx, "the objects", d.reconciled); err != nil {
		return since, err
	}
	return since, kube.Until(ctx, "quiet", d.quiet())
}

func (d *demo) meshReady(ctx context.Context) error {
	manager := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.ManagerName}}
	agent := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.AgentName}}
	for _, w := range []client.Object{manager, agent} {
		if err := kube.Until(ctx, "ctrlmesh", func(ctx context.Context) error { return d.RolledOut(ctx, w) }); err != nil {
			return err
		}
	}
	return nil
}

// led says which shard is not at work yet.
func (d *demo) led(ctx context.Context) error {
	w, err := d.world(ctx)
	if err != nil {
		return err
	}
	for i := range w.configs {
		c := &w.configs[i]
		if !w.captured(c) {
			return fmt.Errorf("ShardingConfig %s reports a member that is not captured", c.Name)
		}
		if w.leader(c) == "" {
			return fmt.Errorf("no member of %s holds the lock %s", c.Name, lockOf(c))
		}
	}
	return nil
}

// reconciled says how many objects nobody has reconciled yet.
func (d *demo) reconciled(ctx context.Context) error {
	tallies, err := d.tallies(ctx)
	if err != nil {
		return err
	}
	missing := 0
	for _, t := range tallies {
		if t.Status.ObservedGeneration < t.Generation {
			missing++
		}
	}
	if missing > 0 {
		return fmt.Errorf("%d of %d are not reconciled", missing, len(tallies))
	}
	return nil
}

// quiet holds when no object has changed for a while: a second pod may be slower
// than the first, and must be seen all the same.
func (d *demo) quiet() func(context.Context) error {
	const long = 2 * time.Second
	var last map[string]string
	var since time.Time
	return func(ctx context.Context) error {
		tallies, err := d.tallies(ctx)
		if err != nil {
			return err
		}
		now := make(map[string]string, len(tallies))
		changed := len(tallies) != len(last)
		for _, t := range tallies {
			now[string(t.UID)] = t.ResourceVersion
			changed = changed || last[string(t.UID)] != t.ResourceVersion
		}
		if last = now; changed {
			since = time.Now()
		}
		if time.Since(since) < long {
			return errors.New("objects are still being written")
		}
		return nil
	}
}
