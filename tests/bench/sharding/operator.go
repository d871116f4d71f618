package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

const (
	// padding makes the cached objects large enough to measure.
	padding  = 4 << 10
	creators = 32
	warmUp   = 3 * time.Second
)

// Throughput is measured with an operator that is bound by its concurrency, not by the
// machine's two cores: it works on one object at a time, each for a while.
const (
	wait    = 100 * time.Millisecond
	mostP90 = 600 * time.Millisecond // the latency at which throughputs are compared
	tryFor  = 10 * time.Second
	tries   = 4
)

// result is the measurement of a setting.
type result struct {
	*setting
	used       []usage // per reconcile, in each round
	idle       []usage // per second without changes
	took       latencies
	live       []share
	throughput float64 // changes a second
	at         latencies
}

// share is a pod's part of the objects, and the size of its cache.
type share struct{ of, bytes float64 }

// operator measures the operator in all settings, which take turns.
func (b *bench) operator(ctx context.Context) ([]string, error) {
	if err := b.ApplyPath(ctx, operatorDeploy, "StatefulSet"); err != nil {
		return nil, err
	}
	var results []*result
	for _, shards := range append([]int32{0}, b.shards...) {
		results = append(results, &result{setting: &setting{bench: b, shards: shards}})
	}
	results = append(results, &result{setting: &setting{bench: b, byHand: byHand}})
	namespaces, err := b.makeNamespaces(ctx, "bench-tenant-%02d", b.namespaces)
	if err != nil {
		return nil, err
	}
	empty, err := results[0].empty(ctx)
	if err != nil {
		return nil, fmt.Errorf("an empty cache: %w", err)
	}
	progress("making %d objects", b.namespaces*b.each)
	if err := b.makeTallies(ctx, namespaces); err != nil {
		return nil, err
	}
	for _, r := range results[1:] { // their first cuts depend on the existing objects
		if err := r.make(ctx); err != nil {
			return nil, err
		}
	}
	c, err := b.newChurn(ctx)
	if err != nil {
		return nil, err
	}
	before := stats.Load()
	for round := range b.rounds {
		slices.Reverse(results[1:]) // so that no setting always has its turn after another
		for _, r := range results {
			progress("round %d: %s", round+1, r)
			if err := r.turn(ctx, c, namespaces, empty, round == b.rounds-1); err != nil {
				return nil, fmt.Errorf("%s: %w", r, err)
			}
		}
	}
	slices.SortFunc(results, func(x, y *result) int {
		return cmp.Or(cmp.Compare(x.shards, y.shards), cmp.Compare(x.byHand, y.byHand))
	})
	return b.report(results, before), nil
}

// empty returns the live heap of an operator that caches nothing.
func (r *result) empty(ctx context.Context) (float64, error) {
	if err := r.make(ctx); err != nil {
		return 0, err
	}
	if err := r.start(ctx); err != nil {
		return 0, err
	}
	bytes, err := r.bench.live(ctx, r.namespace(), operatorName+"-0")
	if err != nil {
		return 0, err
	}
	return bytes, r.stop(ctx)
}

// turn runs one turn of a setting; only the last turn measures everything.
func (r *result) turn(ctx context.Context, c *churn, namespaces []string, empty float64, last bool) error {
	if err := r.start(ctx); err != nil {
		return err
	}
	// Changes in all shards are reconciled when all shards have leaders; when writes stop, the
	// leaders have reconciled all other objects.
	if _, err := c.run(ctx, r.rate, warmUp); err != nil {
		return err
	}
	if err := c.quiet(ctx); err != nil {
		return err
	}
	idle, err := r.bench.idle(ctx, r.namespace())
	if err != nil {
		return err
	}
	before, err := r.bench.used(ctx, r.namespace())
	if err != nil {
		return err
	}
	took, err := c.run(ctx, r.rate, r.lasts)
	if err != nil {
		return err
	}
	after, err := r.bench.used(ctx, r.namespace())
	if err != nil {
		return err
	}
	used := after.minus(before).over(len(took))
	progress("%s: %d changes, each %.3f ms of the operator, %.3f of agents, %.3f of the manager", r, len(took), ms(used.operator), ms(used.agents), ms(used.manager))
	r.used, r.took, r.idle = append(r.used, used), append(r.took, took...), append(r.idle, idle)
	if last {
		if err := r.caches(ctx, namespaces, empty); err != nil {
			return err
		}
		if r.shards > 0 && r.has("throughput") {
			if err := r.most(ctx, c); err != nil {
				return err
			}
		}
	}
	return r.stop(ctx)
}

// caches measures the size of each pod's cache.
func (r *result) caches(ctx context.Context, namespaces []string, empty float64) error {
	shares, err := r.shares(ctx, namespaces)
	if err != nil {
		return err
	}
	for pod, of := range shares {
		bytes, err := r.bench.live(ctx, r.namespace(), pod)
		if err != nil {
			return err
		}
		r.live = append(r.live, share{of, bytes - empty})
	}
	return nil
}

// most finds the throughput at which latency is still within its limit.
func (r *result) most(ctx context.Context, c *churn) error {
	if err := r.start(ctx, "-workers=1", "-wait="+wait.String()); err != nil {
		return err
	}
	if err := c.quiet(ctx); err != nil {
		return err
	}
	low, high := 0.0, float64(r.shards)/wait.Seconds() // if writing took no time
	for range tries {
		rate := low + (high-low)*2/3
		took, err := c.run(ctx, rate, tryFor)
		if err == nil && took.percentile(90) > mostP90 { // other load of the machine may be the cause
			took, err = c.run(ctx, rate, tryFor)
		}
		if err != nil {
			return err
		}
		p90 := took.percentile(90)
		progress("%s: %.1f changes/s: p90 %v", r, rate, p90.Round(time.Millisecond))
		if p90 > mostP90 {
			high = rate
			continue
		}
		low, r.throughput, r.at = rate, rate, took
	}
	return nil
}

// makeNamespaces creates n namespaces and returns their names.
func (b *bench) makeNamespaces(ctx context.Context, format string, n int) (names []string, err error) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i := range n {
		name := fmt.Sprintf(format, i)
		names = append(names, name)
		group.Go(func() error { return b.CreateAll(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}) })
	}
	return names, group.Wait()
}

func (b *bench) makeTallies(ctx context.Context, namespaces []string) error {
	text := strings.Repeat("a benchmark's annotation, 64 bytes at a time, over and over....\n", padding/64)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i, ns := range namespaces {
		for range b.each {
			group.Go(func() error {
				return b.CreateAll(ctx, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{
					Namespace: ns, GenerateName: "t-", Labels: map[string]string{partLabel: strconv.Itoa(i % byHand)},
					Annotations: map[string]string{"bench.ctrlmesh.io/padding": text}}})
			})
		}
	}
	return group.Wait()
}
