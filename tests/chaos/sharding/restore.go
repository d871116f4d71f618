package sharding

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
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	restoreSeed = 7
	maxAge      = time.Minute // of a backup
	minAge      = time.Second
	// minMoves is the minimum of handovers that a restore undoes.
	minMoves = 2
	// lockProof is how long the manager renews a lock that the backup says is the mesh's,
	// before any shard may act: a pod outside the mesh may have acquired it since the backup.
	lockProof = 2 * time.Minute
)

// restore restores backups of etcd that are some handovers old, while the operator and its
// agents run. No namespace may then have two owners, and all must have one in the end.
func (s *suite) restore(ctx context.Context) error {
	o, err := s.start(ctx, "restore", operator.NewSpec(3, meshv1alpha1.OnChangeRelist, operator.FirstTenant))
	if o == nil {
		return err
	}
	if err == nil {
		err = o.restores(ctx)
	}
	return errors.Join(err, o.judgeRestores(ctx), o.Remove(ctx))
}

// restores takes and restores minRestores backups.
func (o *shardedOperator) restores(ctx context.Context) error {
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
		return o.WaitSettled(ctx)
	}
	o.Writer.MaxWait += lockProof
	for i := range minRestores {
		if err := move(); err != nil {
			return fmt.Errorf("after %d restores: %w", i, err)
		}
		backup, err := o.ShardingConfig(ctx)
		if err != nil {
			return err
		}
		file := filepath.Join(dir, fmt.Sprintf("%d.db", i))
		if err := o.NodeScript(ctx, "snapshot", "etcd", file); err != nil {
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
		if err := o.NodeScript(context.WithoutCancel(ctx), "restore", "etcd", file); err != nil {
			return err
		}
		o.APIServerRestarts = append(o.APIServerRestarts, start)
		o.Writer.Reset()
		if err := o.startedAnew(ctx, backup); err != nil {
			return fmt.Errorf("restore %d: %w", i+1, err)
		}
		o.counts.restores++
		o.Logf("  restore %d: %v and %d moves back; settled after %v", i+1,
			start.Sub(taken).Round(time.Second), moved, time.Since(start).Round(100*time.Millisecond))
	}
	return nil
}

// startedAnew waits until the manager has noticed that etcd was restored, and the shards have
// settled again. The restored status alone may say that they have.
func (o *shardedOperator) startedAnew(ctx context.Context, backup *meshv1alpha1.ShardingConfig) error {
	return kube.UntilWithin(ctx, operator.SettleTimeout+lockProof, "the root to restart", func(ctx context.Context) error {
		root, err := o.ShardingConfig(ctx)
		if err != nil {
			return err
		}
		if s := root.Status.Root; s == nil || s.MinSerial <= backup.Status.Root.MinSerial {
			return errors.New("the manager has not noticed that the state is an earlier one")
		}
		return o.Settled(ctx)
	})
}

// judgeRestores stops the writer and judges by turns: the states in force right after a
// restore are not in the audit log, because they were written before it and partly undone.
func (o *shardedOperator) judgeRestores(ctx context.Context) error {
	o.CheckWaits(ctx)
	states, writes, err := o.Evidence()
	if err != nil {
		return err
	}
	wrong := audit.Turns(states, writes)
	o.Counts.DoubleWrites += len(wrong)
	harness.LogSome(o.Testbed, 5, "  ! %s", wrong)
	o.RequireEvidence(states, writes)
	o.Logf("  %d restores; %d writes, %d out of turn", o.counts.restores, len(writes), len(wrong))
	return nil
}
