package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

const (
	changeEvery  = 400 * time.Millisecond // one namespace after the other
	observeEvery = 250 * time.Millisecond
	passingEvery = 3               // rounds over all namespaces
	silence      = time.Minute     // after this time the status must report the problem
	finalWait    = 2 * time.Minute // for the last changes to be reconciled
)

// change is one that the operator must act on.
type change struct {
	object     types.NamespacedName
	generation int64 // that the operator must have observed; 0 if the object must be deleted
	phase      string
	at         time.Time // when it was requested
	made       time.Time // when the apiserver had answered
}

// sample is how long a change took to be reconciled.
type sample struct {
	phase string
	took  time.Duration
}

// churn changes the objects of a set of namespaces all the time, and watches the operator act.
type churn struct {
	*trial
	tenants []string
	stop    context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	phase   string
	pending []change
	samples []sample
	passing map[string][]string // by namespace
	failed  error               // the last error of a change
	silent  map[string]bool     // namespaces that stood still while the status reported nothing
}

func (t *trial) startChurn(ctx context.Context, set, phase string) *churn {
	ctx, stop := context.WithCancel(ctx)
	c := &churn{
		trial: t, tenants: tenantsOf(set), stop: stop, phase: phase,
		passing: map[string][]string{}, silent: map[string]bool{},
	}
	c.running.Go(func() { kube.Every(ctx, changeEvery, c.step) })
	c.running.Go(func() { kube.Every(ctx, observeEvery, func(ctx context.Context, _ int) { c.observe(ctx) }) })
	return c
}

// enter names the phase of the changes from now on.
func (c *churn) enter(phase string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.phase = phase
}

// step makes the i-th change, also if the churn is stopped meanwhile, so that all objects to
// remove are known.
func (c *churn) step(ctx context.Context, i int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	namespace, round := c.tenants[i%len(c.tenants)], i/len(c.tenants)
	var errs []error
	if len(c.Patches) > 0 {
		errs = append(errs, c.patch(ctx, namespace, c.Patches[round%len(c.Patches)]))
	}
	if c.Evicts || round%passingEvery == 0 {
		errs = append(errs, c.pass(ctx, namespace, fmt.Sprintf("%s-%d", passingName, round)))
	}
	if err := errors.Join(errs...); err != nil {
		c.mu.Lock()
		c.failed = err
		c.mu.Unlock()
	}
}

// patch changes the tracked object of a namespace.
func (c *churn) patch(ctx context.Context, namespace, patch string) error {
	obj := c.object(namespace, trackedName)
	at := time.Now()
	if err := c.Patch(ctx, obj, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		return fmt.Errorf("changing %s/%s: %w", namespace, trackedName, err)
	}
	c.await(obj, at)
	return nil
}

// pass creates a passing object, and deletes the one before it unless the operator does.
func (c *churn) pass(ctx context.Context, namespace, name string) error {
	text, err := c.manifest("passing.yaml", "$(NAMESPACE)", namespace, passingName, name)
	if err != nil || text == nil {
		return err
	}
	objects, err := decode(text)
	if err != nil {
		return fmt.Errorf("reading passing.yaml of %s: %w", c.Name, err)
	}
	at := time.Now()
	for _, obj := range objects {
		obj.SetNamespace(namespace)
		if err := c.Create(ctx, obj); err != nil {
			return fmt.Errorf("creating %s/%s: %w", namespace, name, err)
		}
		c.await(obj, at)
	}
	c.mu.Lock()
	before := c.passing[namespace]
	c.passing[namespace] = []string{name}
	c.mu.Unlock()
	return c.removePassing(ctx, namespace, before)
}

func (c *churn) removePassing(ctx context.Context, namespace string, names []string) error {
	if c.Evicts {
		return nil
	}
	for _, name := range names {
		if err := c.Delete(ctx, c.object(namespace, name)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting %s/%s: %w", namespace, name, err)
		}
	}
	return nil
}

// awaitDeletion records that the operator must finalise an object.
func (c *churn) awaitDeletion(namespace, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.pending = append(c.pending, change{object: types.NamespacedName{Namespace: namespace, Name: name}, phase: c.phase, at: now, made: now})
}

func (c *churn) object(namespace, name string) *unstructured.Unstructured {
	obj := &unstructured.Unstructured{}
	obj.SetGroupVersionKind(c.Tracked)
	obj.SetNamespace(namespace)
	obj.SetName(name)
	return obj
}

// await records that the operator must act on an object as it is now.
func (c *churn) await(obj *unstructured.Unstructured, at time.Time) {
	if obj.GroupVersionKind() != c.Tracked {
		return
	}
	want := change{object: client.ObjectKeyFromObject(obj), generation: obj.GetGeneration(), at: at, made: time.Now()}
	c.mu.Lock()
	defer c.mu.Unlock()
	want.phase = c.phase
	if c.Evicts {
		want.generation = 0
	}
	c.pending = append(c.pending, want)
}

// observe removes the changes that the operator has acted on since the last time.
func (c *churn) observe(ctx context.Context) {
	before := time.Now() // the list need not show changes made since
	seen, err := c.observed(ctx)
	if err != nil {
		return
	}
	now := time.Now()
	c.mu.Lock()
	var overdue []string
	c.pending = slices.DeleteFunc(c.pending, func(want change) bool {
		if want.made.After(before) {
			return false
		}
		switch done, counts := want.done(seen); {
		case done && counts:
			c.samples = append(c.samples, sample{want.phase, now.Sub(want.at)})
			return true
		case done:
			return true
		}
		if now.Sub(want.at) > silence && !c.silent[want.object.Namespace] {
			overdue = append(overdue, want.object.Namespace)
		}
		return false
	})
	c.mu.Unlock()
	c.judgeSilence(ctx, overdue)
}

// observed returns the generation that the operator has observed, by object.
func (c *churn) observed(ctx context.Context) (map[types.NamespacedName]int64, error) {
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(c.Tracked)
	if err := c.List(ctx, list); err != nil {
		return nil, err
	}
	seen := map[types.NamespacedName]int64{}
	for i := range list.Items {
		seen[client.ObjectKeyFromObject(&list.Items[i])] = observedGeneration(list.Items[i].Object, cmp.Or(c.Condition, "Ready"))
	}
	return seen, nil
}

// observedGeneration is that of the status, else that of a condition.
func observedGeneration(obj map[string]any, condition string) int64 {
	if generation, ok, _ := unstructured.NestedInt64(obj, "status", "observedGeneration"); ok {
		return generation
	}
	conditions, _, _ := unstructured.NestedSlice(obj, "status", "conditions")
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok && c["type"] == condition {
			generation, _, _ := unstructured.NestedInt64(c, "observedGeneration")
			return generation
		}
	}
	return 0
}

// done reports whether the operator need not act any more, and whether that is because it acted.
func (w change) done(seen map[types.NamespacedName]int64) (done, counts bool) {
	generation, exists := seen[w.object]
	switch {
	case w.generation == 0:
		return !exists, true
	case !exists:
		return true, false // deleted by the trial
	default:
		return generation >= w.generation, true
	}
}

// judgeSilence records namespaces whose changes wait for long while the status reports no problem.
func (c *churn) judgeSilence(ctx context.Context, namespaces []string) {
	if len(namespaces) == 0 {
		return
	}
	root, err := c.root(ctx)
	if err != nil || !reportsReady(root, silence) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, namespace := range namespaces {
		if !c.silent[namespace] {
			c.silent[namespace] = true
			c.say("  ! %s stands still since %v, and the status reports Ready", namespace, silence)
		}
	}
}

// reconciled waits until the operator has acted on all changes that were made before the call.
func (c *churn) reconciled(ctx context.Context) error {
	began := time.Now()
	return c.until(ctx, "the changes to be reconciled", func(context.Context) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		waiting := map[string]int{}
		for _, want := range c.pending {
			if want.at.Before(began) {
				waiting[want.object.Namespace]++
			}
		}
		if len(waiting) > 0 {
			return fmt.Errorf("waiting in %v (last error of a change: %w)", waiting, cmp.Or(c.failed, errNone))
		}
		return nil
	})
}

var errNone = errors.New("none")

// finish ends the changes, brings all objects into their final state, and returns the changes
// that the operator has not acted on.
func (c *churn) finish(ctx context.Context) ([]change, error) {
	c.stop()
	c.running.Wait()
	for _, namespace := range c.tenants {
		if err := c.removePassing(ctx, namespace, c.passing[namespace]); err != nil {
			return nil, err
		}
		for _, name := range c.passing[namespace] {
			c.awaitDeletion(namespace, name)
		}
		if err := c.applyIn(ctx, namespace, "workload.yaml"); err != nil {
			return nil, err
		}
		obj, at := c.object(namespace, trackedName), time.Now()
		if err := c.Get(ctx, client.ObjectKeyFromObject(obj), obj); err == nil {
			c.await(obj, at)
		} else if !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("reading %s/%s: %w", namespace, trackedName, err)
		}
	}
	_ = kube.UntilWithin(ctx, finalWait+c.Unreleased, "the last changes", func(ctx context.Context) error {
		c.observe(ctx)
		if len(c.pending) > 0 {
			return fmt.Errorf("%d are pending", len(c.pending))
		}
		return nil
	})
	return c.pending, nil
}

// percentile returns the q-quantile, in milliseconds, of what the changes of a phase took.
func percentile(samples []sample, phase string, q float64) int64 {
	var took []time.Duration
	for _, s := range samples {
		if s.phase == phase {
			took = append(took, s.took)
		}
	}
	return stats.Percentile(took, q).Milliseconds()
}
