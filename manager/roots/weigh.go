package roots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

const (
	// weighEvery is the time between two weighings, give or take a tenth.
	weighEvery = 10 * time.Minute
	// firstWithin bounds how long the first shards of a root wait for weights: some
	// thousand requests take that long, and shards made by less are soon moved again.
	firstWithin = time.Minute
	weighers    = 8
)

// Weigher counts the objects that there are in namespaces. It asks for one object
// of each resource in each namespace and is told how many more there are, so that
// it costs the apiserver little, and itself no memory for objects.
type Weigher struct {
	// Metadata must not limit the rate by itself.
	Metadata metadata.Interface
	// Served lists what the apiserver serves, in preferred versions.
	Served func() ([]*metav1.APIResourceList, error)
	// Limiter bounds the requests.
	Limiter *rate.Limiter
	// Changed is called when First may have something new.
	Changed func()
	Log     *slog.Logger

	mu         sync.Mutex
	namespaces []string
	weighings  map[types.UID]*weighing // by root
	poke       chan struct{}
}

// weighing is of one root.
type weighing struct {
	groups  []v1alpha1.ResourceGroup
	again   bool      // weigh every so often
	objects bool      // keys are objects, so that namespaces weigh nothing
	since   time.Time // when it was asked for
	next    time.Time // when it is due
	counted map[string]int64
	done    bool   // once
	problem string // of the last time
}

// Set tells which roots there are, and which namespaces.
func (w *Weigher) Set(roots []*v1alpha1.ShardingConfig, namespaces []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.init()
	w.namespaces = namespaces
	next := make(map[types.UID]*weighing, len(roots))
	for _, c := range roots {
		one := w.weighings[c.UID]
		if one == nil {
			now := time.Now()
			one = &weighing{since: now, next: now, counted: map[string]int64{}}
			time.AfterFunc(firstWithin, w.Changed)
			select {
			case w.poke <- struct{}{}:
			default:
			}
		}
		one.groups = label.Divided(c)
		one.again = rebalance(c) != v1alpha1.RebalanceOff
		one.objects = c.Spec.Root.Key == v1alpha1.KeyObject
		next[c.UID] = one
	}
	w.weighings = next
}

func (w *Weigher) init() {
	if w.poke == nil {
		w.poke = make(chan struct{}, 1)
	}
}

// First are the weights to divide keys by. They are not ok while nothing was
// weighed yet and that is worth waiting for.
func (w *Weigher) First(root types.UID) (weights layout.Weights, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	one := w.weighings[root]
	if one == nil || !one.done && !one.objects && time.Since(one.since) < firstWithin {
		return nil, false
	}
	return w.weights(one), true
}

// Weights are those of the namespaces that exist. One that was not counted weighs
// as much as the others do on average.
func (w *Weigher) Weights(root types.UID) layout.Weights {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.weights(w.weighings[root])
}

// Problem says what kept objects from being counted; empty if nothing did.
func (w *Weigher) Problem(root types.UID) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one := w.weighings[root]; one != nil {
		return one.problem
	}
	return ""
}

func (w *Weigher) weights(one *weighing) layout.Weights {
	if one == nil || one.objects {
		return nil
	}
	out := make(layout.Weights, len(w.namespaces))
	var sum, n int64
	for _, ns := range w.namespaces {
		if weight, ok := one.counted[ns]; ok {
			sum += weight
			n++
			out[ns] = weight
		}
	}
	mean := int64(1)
	if n > 0 {
		mean = max(1, sum/n)
	}
	for _, ns := range w.namespaces {
		if _, ok := out[ns]; !ok {
			out[ns] = mean
		}
	}
	return out
}

// Run weighs until the context ends.
func (w *Weigher) Run(ctx context.Context) error {
	w.mu.Lock()
	w.init()
	w.mu.Unlock()
	for {
		root, one, namespaces, wait := w.due()
		if one == nil {
			select {
			case <-ctx.Done():
				return nil
			case <-w.poke:
			case <-time.After(wait):
			}
			continue
		}
		counted, err := w.count(ctx, one, namespaces)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			w.Log.Warn("not everything could be weighed", "error", err)
		}
		w.mu.Lock()
		if is := w.weighings[root]; is != nil {
			is.done, is.problem = true, ""
			if err != nil {
				is.problem = err.Error()
			}
			is.next = time.Now().Add(weighEvery - weighEvery/10 + rand.N(weighEvery/5))
			if counted != nil {
				is.counted = counted
			}
		}
		w.mu.Unlock()
		w.Changed()
	}
}

// due is what to weigh now, or how long to wait.
func (w *Weigher) due() (root types.UID, one *weighing, namespaces []string, wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	wait = weighEvery
	for uid, is := range w.weighings {
		if is.objects || is.done && !is.again {
			continue
		}
		if left := time.Until(is.next); left > 0 {
			wait = min(wait, left)
			continue
		}
		copied := *is
		return uid, &copied, w.namespaces, 0
	}
	return "", nil, nil, wait
}

// count counts the objects of each namespace; one that could not be counted has
// what it had, if it was before. What is counted goes to the weighing as it comes,
// for who cannot wait for all.
func (w *Weigher) count(ctx context.Context, one *weighing, namespaces []string) (map[string]int64, error) {
	served, err := w.Served()
	if err != nil && len(served) == 0 {
		return nil, fmt.Errorf("asking what the apiserver serves: %w", err)
	}
	resources, _ := label.Resolve(one.groups, served)
	counted := make(map[string]int64, len(namespaces))
	w.mu.Lock()
	for _, ns := range namespaces {
		if n, ok := one.counted[ns]; ok {
			counted[ns] = n
		}
	}
	w.mu.Unlock()
	var mu sync.Mutex
	var failed []error
	var forbidden []string
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(weighers)
	refused := map[schema.GroupVersionResource]bool{}
	for _, ns := range namespaces {
		g.Go(func() error {
			sum := int64(0)
			for _, gvr := range resources {
				mu.Lock()
				skip := refused[gvr]
				mu.Unlock()
				if skip {
					continue
				}
				if err := w.Limiter.Wait(ctx); err != nil {
					return err
				}
				n, err := w.objects(ctx, gvr, ns)
				switch {
				case apierrors.IsForbidden(err):
					mu.Lock()
					if !refused[gvr] {
						forbidden = append(forbidden, gvr.GroupResource().String())
					}
					refused[gvr] = true // and would be in the next namespace
					mu.Unlock()
					continue
				case err != nil:
					mu.Lock()
					failed = append(failed, fmt.Errorf("%s in namespace %s: %w", gvr.GroupResource(), ns, err))
					mu.Unlock()
					return nil // what was counted the last time is nearer than a part
				}
				sum += n
			}
			mu.Lock()
			counted[ns] = sum
			mu.Unlock()
			w.mu.Lock()
			one.counted[ns] = sum
			w.mu.Unlock()
			return nil
		})
	}
	err = g.Wait()
	if len(failed) > 3 {
		failed = failed[:3]
	}
	if len(forbidden) > 0 {
		slices.Sort(forbidden)
		failed = append(failed, errors.New(label.Allow("list", forbidden)))
	}
	return counted, errors.Join(append(failed, err)...)
}

// objects is the number of objects of a resource in a namespace.
func (w *Weigher) objects(ctx context.Context, gvr schema.GroupVersionResource, namespace string) (int64, error) {
	list, err := w.Metadata.Resource(gvr).Namespace(namespace).List(ctx, metav1.ListOptions{Limit: 1})
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	n := int64(len(list.Items))
	if more := list.RemainingItemCount; more != nil {
		n += *more
	}
	return n, nil
}
