package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	deploy   = "tests/operators/tally/deploy/"
	operator = "operator-demo" // its namespace
	workload = "tally"         // its StatefulSet, ServiceAccount and pods' label "app"
	lock     = "tally-leader"

	shards = 2
)

// played has the times from which the counts begin.
type played struct {
	began   time.Time // the operator started; zero if there is nothing to count
	sharded time.Time // its pods were all members of shards
}

// play runs the demo and waits until the operator has reconciled all objects.
func (d *demo) play(ctx context.Context) (at played, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	names := d.namespaceNames()
	if err := d.prepare(ctx, names); err != nil {
		return at, err
	}
	at.began = time.Now()
	at.sharded = at.began
	d.say("starting the operator outside the mesh, two pods on two nodes")
	if err := d.makeOperator(ctx); err != nil {
		return at, err
	}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: operator, Name: workload}}
	if err := kube.Until(ctx, "the operator's pods", func(ctx context.Context) error { return d.RolledOut(ctx, set) }); err != nil {
		return at, err
	}
	if err := kube.Until(ctx, "the objects", d.reconciled); err != nil {
		return at, err
	}
	d.say("one pod reconciled all %d objects", d.objects/2)
	if d.sharded {
		if err := d.adopt(ctx); err != nil {
			return at, err
		}
		at.sharded = time.Now()
		d.say("changing every object once more")
		if err := d.changeAll(ctx, "sharded"); err != nil {
			return at, err
		}
	}
	d.say("creating the other half of the objects")
	if err := d.makeObjects(ctx, names, d.objects/2, d.objects); err != nil {
		return at, err
	}
	d.say("waiting until every object is reconciled and writes have stopped")
	if err := kube.Until(ctx, "the objects", d.reconciled); err != nil {
		return at, err
	}
	return at, kube.Until(ctx, "quiet", d.quiet())
}

// prepare creates the namespaces and the first half of the objects.
func (d *demo) prepare(ctx context.Context, names []string) error {
	if d.sharded {
		d.say("waiting for ctrlmesh to be ready")
		if err := kube.Until(ctx, "ctrlmesh", d.MeshReady); err != nil {
			return err
		}
	}
	if err := d.ApplyPath(ctx, deploy, "StatefulSet"); err != nil {
		return err
	}
	d.say("deleting the objects of an earlier run")
	if err := d.clear(ctx); err != nil {
		return err
	}
	d.say("creating %d namespaces and the first half of %d objects", len(names), d.objects)
	if err := d.makeNamespaces(ctx, names); err != nil {
		return err
	}
	return d.makeObjects(ctx, names, 0, d.objects/2)
}

// adopt shards the operator by a rolling update, while its objects change.
func (d *demo) adopt(ctx context.Context) error {
	churning, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	changes := 0
	go func() {
		var err error
		changes, err = d.churn(churning)
		done <- err
	}()
	d.say("applying a ShardingConfig of %d shards, while an object changes every %v", shards, churnEvery)
	if err := d.makeRoot(ctx); err != nil {
		return err
	}
	observed := d.observed()
	if err := kube.Until(ctx, "the manager", observed); err != nil {
		return err
	}
	d.say("setting the label of the mesh on the pod template")
	if err := d.label(ctx); err != nil {
		return err
	}
	if err := kube.Until(ctx, "a leader of each shard", d.led(observed)); err != nil {
		return err
	}
	stop()
	if err := <-done; err != nil {
		return err
	}
	d.say("adopted: %d objects changed meanwhile", changes)
	return nil
}

// observed returns an error until the manager has seen the root. It prints each new state.
func (d *demo) observed() func(context.Context) error {
	last := ""
	return func(ctx context.Context) error {
		root := &meshv1alpha1.ShardingConfig{}
		if err := d.Get(ctx, client.ObjectKey{Namespace: operator, Name: workload}, root); err != nil {
			return err
		}
		ready := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionReady)
		if ready == nil {
			return errors.New("the manager has not seen the ShardingConfig yet")
		}
		if last != ready.Reason {
			last = ready.Reason
			d.say("  %s: %s", ready.Reason, ready.Message)
		}
		return nil
	}
}

// led returns an error until each shard has a leader. It checks the root first.
func (d *demo) led(root func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := root(ctx); err != nil {
			return err
		}
		w, err := d.world(ctx)
		if err != nil {
			return err
		}
		if len(w.shards) != shards || !meta.IsStatusConditionTrue(w.root.Status.Conditions, meshv1alpha1.ConditionReady) {
			return fmt.Errorf("ShardingConfig %s is not ready: %+v", workload, w.root.Status.Conditions)
		}
		for i := range w.shards {
			c := &w.shards[i]
			if !w.captured(c) {
				return fmt.Errorf("ShardingConfig %s reports a member that is not captured", c.Name)
			}
			if w.leader(c) == "" {
				return fmt.Errorf("no member of %s holds the lock %s", c.Name, lockOf(c))
			}
		}
		return nil
	}
}

// reconciled returns an error until every object is reconciled.
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

// quiet returns an error until no object has changed for a while: a second owner of an object
// may write later than the first, and must be detected.
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
