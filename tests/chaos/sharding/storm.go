package sharding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	partitionFor = 8 * time.Second // longer than any retry interval
	stormSeed    = 4               // makes runs repeatable
)

// disruption breaks something, at random.
type disruption func(context.Context, *shardedOperator, *rand.Rand) error

// disruptions is a disruption, and how often it occurs.
type disruptions struct {
	name  string
	times int
	cause disruption
}

var stormDisruptions = []disruptions{
	{"an operator killed", 8, killPod},
	{"an operator's pod deleted", 6, deletePod},
	{"an agent killed", 6, killAgent},
	{"the manager killed", 3, killManager},
	{"an agent cut off", 4, partitionAgent},
	{"the apiserver restarted", 2, restartAPIServer},
}

// storm moves keys all the time while everything that can break does.
func (s *suite) storm(ctx context.Context) error {
	return s.run(ctx, "storm", operator.NewSpec(5, meshv1alpha1.OnChangeRelist, operator.FirstTenant), func(ctx context.Context, o *shardedOperator) error {
		moving, stop := context.WithCancel(ctx)
		moved := make(chan error, 1)
		go func() { moved <- o.moveUntil(moving) }()
		err := o.disrupt(ctx, stormDisruptions)
		stop()
		return errors.Join(err, <-moved, o.WaitSettled(ctx))
	})
}

// moveUntil moves the canary until ctx ends. Each move must settle.
func (o *shardedOperator) moveUntil(ctx context.Context) error {
	for i := 0; ; i++ {
		err := o.moveCanary(ctx, i)
		if err == nil {
			err = o.WaitSettled(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("move %d of the canary: %w", i+1, err)
		}
	}
}

// disrupt causes disruptions, in an order that is the same in each run.
func (o *shardedOperator) disrupt(ctx context.Context, causes []disruptions) error {
	random := rand.New(rand.NewPCG(stormSeed, 0))
	var all []int
	for i, d := range causes {
		for range d.times {
			all = append(all, i)
		}
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, i := range all {
		// At any time of a move.
		if err := kube.Sleep(ctx, time.Duration(random.Int64N(int64(3*time.Second)))); err != nil {
			return err
		}
		start := time.Now()
		if err := causes[i].cause(ctx, o, random); err != nil {
			return fmt.Errorf("%s: %w", causes[i].name, err)
		}
		o.Logf("  %s, %v", causes[i].name, time.Since(start).Round(100*time.Millisecond))
	}
	return nil
}
