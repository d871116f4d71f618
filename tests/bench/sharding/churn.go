package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// quietFor is the time without writes before a measurement begins.
const quietFor = 3 * time.Second

// churn changes objects and watches until they are reconciled. A change contains its time,
// which the operator copies to the status.
type churn struct {
	client  client.Client
	random  *rand.Rand // the same in every run
	objects []types.NamespacedName
	next    int

	mu      sync.Mutex
	wrote   time.Time                          // time of the last write by any client
	waiting map[types.NamespacedName]time.Time // changes that are not reconciled
	took    []time.Duration
}

// newChurn starts a watch until ctx ends.
func (b *bench) newChurn(ctx context.Context) (*churn, error) {
	c := &churn{client: b.Client, random: rand.New(rand.NewPCG(1, 1)), wrote: time.Now(), waiting: map[types.NamespacedName]time.Time{}}
	informers, err := cache.New(b.Config, cache.Options{Scheme: b.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("watching the objects: %w", err)
	}
	informer, err := informers.GetInformer(ctx, &tallyv1.Tally{}, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, fmt.Errorf("watching the objects: %w", err)
	}
	handler, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) { c.saw(obj.(*tallyv1.Tally), time.Now()) },
	})
	if err != nil {
		return nil, fmt.Errorf("watching the objects: %w", err)
	}
	go func() { _ = informers.Start(ctx) }() // fails only if started twice
	if !toolscache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return nil, fmt.Errorf("listing the objects: %w", context.Cause(ctx))
	}
	var list tallyv1.TallyList
	if err := informers.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("listing the objects: %w", err)
	}
	for _, t := range list.Items {
		c.objects = append(c.objects, client.ObjectKeyFromObject(&t))
	}
	c.random.Shuffle(len(c.objects), func(i, j int) { c.objects[i], c.objects[j] = c.objects[j], c.objects[i] })
	return c, nil
}

func (c *churn) saw(t *tallyv1.Tally, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrote = now
	key := client.ObjectKeyFromObject(t)
	if sent, ok := c.waiting[key]; ok && t.Status.Said == say(sent) {
		c.took = append(c.took, now.Sub(sent))
		delete(c.waiting, key)
	}
}

func say(t time.Time) string { return strconv.FormatInt(t.UnixNano(), 10) }

// quiet waits until there was no write for quietFor.
func (c *churn) quiet(ctx context.Context) error {
	return until(ctx, "the operator to have nothing to do", func(context.Context) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if time.Since(c.wrote) < quietFor {
			return errors.New("it writes")
		}
		return nil
	})
}

// latencies are the times from sending a change to reading it in a status, sorted.
type latencies []time.Duration

func (l latencies) percentile(p int) time.Duration { return stats.Percentile(l, float64(p)/100) }

// run changes objects at a rate, at random times like many users, and waits until all changes
// are reconciled.
func (c *churn) run(ctx context.Context, rate float64, lasts time.Duration) (latencies, error) {
	c.took = nil // no change is pending
	group, sending := errgroup.WithContext(ctx)
	begin := time.Now()
	for at := time.Duration(0); at < lasts; at += time.Duration(c.random.ExpFloat64() / rate * float64(time.Second)) {
		select {
		case <-sending.Done():
			return nil, errors.Join(ctx.Err(), group.Wait())
		case <-time.After(time.Until(begin.Add(at))):
		}
		key, sent, err := c.choose()
		if err != nil {
			return nil, errors.Join(err, group.Wait())
		}
		group.Go(func() error {
			t := &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
			patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"say":"`+say(sent)+`"}}`))
			return failure.Wrap(c.client.Patch(sending, t, patch), "changing %s", key)
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	err := until(ctx, "all changes to be reconciled", func(context.Context) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if n := len(c.waiting); n > 0 {
			return fmt.Errorf("%d are not", n)
		}
		return nil
	})
	slices.Sort(c.took)
	return c.took, err
}

// choose returns the next object that has no pending change.
func (c *churn) choose() (types.NamespacedName, time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waiting) == len(c.objects) {
		return types.NamespacedName{}, time.Time{}, errors.New("no object is left that is not waited for: the rate is more than this machine can do")
	}
	for {
		key := c.objects[c.next%len(c.objects)]
		c.next++
		if _, waits := c.waiting[key]; !waits {
			sent := time.Now()
			c.waiting[key] = sent
			return key, sent, nil
		}
	}
}
