package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	restoreSeed = 7
	maxAge      = time.Minute // of a backup
	minAge      = time.Second
	// minMoves is how many handovers a restore undoes at least.
	minMoves = 2
	// lockProof is how long the manager renews a lock that a backup left in the mesh's name
	// before any shard may act: a pod outside the mesh may have acquired it since.
	lockProof = 2 * time.Minute
)

// restore goes back to backups of etcd that are some handovers old, while the operator
// and its agents run on. No namespace may have two owners then, and all must have one
// in the end.
func restore(ctx context.Context, w *world, r *result) error {
	o, err := w.operate(ctx, "restore", divided(3, meshv1alpha1.OnChangeRelist, firstTenant))
	if o == nil {
		return err
	}
	if err == nil {
		err = o.restores(ctx, r)
	}
	return errors.Join(err, o.judgeRestores(ctx, r), o.end(ctx))
}

func (o *operator) restores(ctx context.Context, r *result) error {
	dir, err := os.MkdirTemp("", "ctrlmesh-backup")
	if err != nil {
		return fmt.Errorf("making a place for backups: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	random := rand.New(rand.NewPCG(restoreSeed, 0))
	turn := 0
	move := func() error {
		turn++
		if err := o.moveCanary(ctx, turn); err != nil {
			return err
		}
		return o.settled(ctx)
	}
	o.write.most += lockProof
	for i := range minRestores {
		if err := move(); err != nil {
			return fmt.Errorf("after %d restores: %w", i, err)
		}
		backup, err := o.root(ctx)
		if err != nil {
			return err
		}
		file := filepath.Join(dir, fmt.Sprintf("%d.db", i))
		if err := o.nodeScript(ctx, "snapshot", "etcd", file); err != nil {
			return err
		}
		taken := time.Now()
		age := minAge + time.Duration(random.Int64N(int64(maxAge-minAge)))
		moved := 0
		for ; moved < minMoves || time.Since(taken) < age; moved++ {
			if err := move(); err != nil {
				return fmt.Errorf("after %d restores: %w", i, err)
			}
		}
		start := time.Now()
		if err := o.nodeScript(context.WithoutCancel(ctx), "restore", "etcd", file); err != nil {
			return err
		}
		o.restarts = append(o.restarts, start)
		o.write.forget()
		if err := o.startedAnew(ctx, backup); err != nil {
			return fmt.Errorf("restore %d: %w", i+1, err)
		}
		r.sharding.restores++
		o.say("  restore %d: %v and %d moves back; settled after %v", i+1,
			start.Sub(taken).Round(time.Second), moved, time.Since(start).Round(100*time.Millisecond))
	}
	return nil
}

// startedAnew waits until the manager has noticed that etcd went back to a backup, and the
// shards have settled again. The restored status alone may say that they have.
func (o *operator) startedAnew(ctx context.Context, backup *meshv1alpha1.ShardingConfig) error {
	ctx, cancel := context.WithTimeout(ctx, settling+lockProof)
	defer cancel()
	return kube.Until(ctx, "the root to start anew", func(ctx context.Context) error {
		root, err := o.root(ctx)
		if err != nil {
			return err
		}
		if s := root.Status.Root; s == nil || s.MinSerial <= backup.Status.Root.MinSerial {
			return errors.New("the manager has not noticed that the state is an earlier one")
		}
		return o.settledNow(ctx)
	})
}

// judgeRestores judges by turns: the states in force right after a restore are not in
// the audit log, because they were written before, and partly undone.
func (o *operator) judgeRestores(ctx context.Context, r *result) error {
	o.judgeWaits(ctx, r)
	states, writes, err := o.evidence()
	if err != nil {
		return err
	}
	wrong := audit.Turns(states, writes)
	r.sharding.doubleWrites += len(wrong)
	for _, f := range wrong[:min(5, len(wrong))] {
		o.say("  ! %s", f)
	}
	if len(states) == 0 || len(writes) == 0 {
		r.doubt("%s: the audit log has %d states and %d writes: is its policy that of tests/cluster?", o.part, len(states), len(writes))
	}
	o.say("  %d restores; %d writes, %d out of turn", r.sharding.restores, len(writes), len(wrong))
	return nil
}
