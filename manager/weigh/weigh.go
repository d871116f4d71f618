// Package weigh counts the objects in namespaces, by which shards are balanced.
package weigh

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
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
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/wake"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

const (
	// weighEvery is the longest time between two counts of a namespace, give or take a tenth.
	weighEvery = 10 * time.Minute
	// weighAgain is the time between the first two counts of a namespace. It doubles
	// with each count up to weighEvery: namespaces are created before their objects.
	weighAgain = 15 * time.Second
	// queueShare bounds the requests of a large root: a namespace that had to wait for
	// its count is counted again after queueShare times as long, at the earliest.
	queueShare = 10
	// newWithin is how long the count of a new namespace is awaited before shards are
	// balanced without it.
	newWithin = 30 * time.Second
	// discoverEvery is how old may be what is known of the apiserver's resources.
	discoverEvery = time.Minute
	// permissionEvery is the time between two attempts to list what the manager may not.
	permissionEvery = 15 * time.Second
	weighers        = 8
	// maxFailures bounds how many failed counts a status names.
	maxFailures = 3
)

// Weigher counts the objects in namespaces. It lists one object of each resource in each
// namespace, and reads the number of remaining objects from the response. So the requests
// are cheap for the apiserver, and no objects are kept in memory. New namespaces are counted
// first and separately.
type Weigher struct {
	// Metadata must not limit the rate by itself.
	Metadata metadata.Interface
	// Served lists what the apiserver serves, in preferred versions.
	Served func() ([]*metav1.APIResourceList, error)
	// Limiter bounds the requests.
	Limiter *rate.Limiter
	// FirstWithin bounds how long First waits for counts; a minute if it is zero: some
	// thousand requests take that long, and shards made by fewer counts soon move again.
	FirstWithin time.Duration
	// Changed is called when weights may have changed.
	Changed func()
	Log     *slog.Logger

	mu         sync.Mutex
	weighings  map[types.UID]*weighing // by root
	served     []*metav1.APIResourceList
	discovered time.Time // when served was read
	failing    error     // of discovery, while served is empty
	news       bool      // Changed is to be called
	poke       wake.Flag
}

// Set sets the roots and the namespaces that exist.
func (w *Weigher) Set(roots []*v1alpha1.ShardingConfig, namespaces []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	next := make(map[types.UID]*weighing, len(roots))
	fresh := false
	for _, c := range roots {
		one := w.weighings[c.UID]
		if one == nil {
			one = &weighing{since: now, counts: map[string]*count{}}
			time.AfterFunc(w.firstWithin(), w.Changed)
		}
		one.again = layout.Rebalance(c.Spec.Root) != v1alpha1.RebalanceOff
		one.objects, one.names = c.Spec.Root.Key == v1alpha1.KeyObject, c.Spec.Root.Key == v1alpha1.KeyCluster
		fresh = one.of(counted(c), now) || fresh
		fresh = one.in(namespaces, now) || fresh
		next[c.UID] = one
	}
	w.weighings = next
	if fresh {
		w.poke.Set()
	}
}

// counted returns the resources of a root to count. Weights do not decide what subsets own, so
// that those which divide all resources are not counted: that would list every resource in
// every namespace.
func counted(c *v1alpha1.ShardingConfig) []v1alpha1.ResourceGroup {
	groups := label.Divided(c)
	if layout.ByLabels(c.Spec.Root) && slices.ContainsFunc(label.Resources(groups), layout.Wide) {
		return nil
	}
	return groups
}

func (w *Weigher) firstWithin() time.Duration { return cmp.Or(w.FirstWithin, time.Minute) }

// First returns the weights for the first division of keys. ok is false while a namespace
// has yet to be counted for the first time and is worth waiting for.
func (w *Weigher) First(root types.UID) (weights layout.Weights, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	one := w.weighings[root]
	if one == nil || !one.objects && !one.complete() && time.Since(one.since) < w.firstWithin() {
		return nil, false
	}
	return w.weights(one), true
}

// Weights returns the weights of the namespaces that exist. A namespace that was not
// counted has the average weight of the others.
func (w *Weigher) Weights(root types.UID) layout.Weights {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.weights(w.weighings[root])
}

// Current reports whether Weights are current enough for balancing: no count is pending,
// except those of new namespaces that waited too long.
func (w *Weigher) Current(root types.UID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	one := w.weighings[root]
	if one == nil {
		return false
	}
	return one.objects || !collect.Any(one.counts, func(_ string, c *count) bool {
		return !c.awaited.IsZero() && (!c.seen.After(one.since) || time.Since(c.awaited) < newWithin)
	})
}

// Problem returns why objects cannot be counted; empty if they can.
func (w *Weigher) Problem(root types.UID) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	one := w.weighings[root]
	if one == nil {
		return ""
	}
	var out []string
	if w.failing != nil {
		out = append(out, w.failing.Error())
	}
	for _, ns := range slices.Sorted(maps.Keys(one.counts)) {
		if err := one.counts[ns].err; err != nil && len(out) < maxFailures {
			out = append(out, err.Error())
		}
	}
	unlisted := slices.AppendSeq(slices.Collect(maps.Keys(one.forbidden)), maps.Keys(one.retried))
	forbidden := collect.Map(unlisted, func(gvr schema.GroupVersionResource) string { return gvr.GroupResource().String() })
	if len(forbidden) > 0 {
		slices.Sort(forbidden)
		effect := "some objects do not count: "
		switch {
		case one.names:
			effect = "hashes of names divide the clusters: "
		case w.blind(one):
			effect = "namespaces weigh equally: "
		}
		out = append(out, effect+label.Allow("list", slices.Compact(forbidden)))
	}
	return strings.Join(out, "; ")
}

func (w *Weigher) weights(one *weighing) layout.Weights {
	switch {
	case one == nil || one.objects:
		return nil
	case one.names:
		return one.equally()
	}
	out := make(layout.Weights, len(one.counts))
	equal := w.blind(one)
	var sum, n int64
	for ns, c := range one.counts {
		switch {
		case equal:
			out[ns] = 1
		case c.known:
			sum += c.objects
			n++
			out[ns] = c.objects
		}
	}
	mean := max(1, sum/max(1, n))
	for ns := range one.counts {
		if _, ok := out[ns]; !ok {
			out[ns] = mean
		}
	}
	return out
}

// blind reports whether the manager may list none of the resources, so that
// namespaces weigh equally.
func (w *Weigher) blind(one *weighing) bool {
	resources := one.resources(w.served)
	permitted := func(gvr schema.GroupVersionResource) bool { return !one.forbidden[gvr] && !one.retried[gvr] }
	return len(resources) > 0 && !slices.ContainsFunc(resources, permitted)
}

// Run counts until the context ends.
func (w *Weigher) Run(ctx context.Context) error {
	var g errgroup.Group
	g.SetLimit(weighers)
	defer func() { _ = g.Wait() }() // they return no errors
	for ctx.Err() == nil {
		if err := w.discover(time.Now()); err != nil {
			w.Log.Warn("weighing failed and will be tried again", "error", err)
			w.report()
			w.poke.Sleep(ctx, weighAgain)
			continue
		}
		one, namespace, wait := w.next(time.Now())
		if one == nil {
			w.report()
			w.poke.Sleep(ctx, wait)
			continue
		}
		next := w.begin(one, namespace)
		g.Go(func() error {
			w.weigh(ctx, one, next)
			return nil
		})
	}
	return nil
}

// report calls Changed if there is something new.
func (w *Weigher) report() {
	w.mu.Lock()
	news := w.news
	w.news = false
	w.mu.Unlock()
	if news {
		w.Changed()
	}
}

// next is what to count now, or how long it is until something is due. Roots take turns.
func (w *Weigher) next(now time.Time) (one *weighing, namespace string, wait time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	wait = weighEvery
	for _, o := range w.weighings {
		if o.active() {
			wait = min(wait, w.discovered.Add(discoverEvery).Sub(now))
		}
		if o.active() && len(o.forbidden) > 0 {
			o.tryForbidden(now)
			wait = min(wait, o.retry.Sub(now))
		}
		ns, c := o.urgent(now)
		switch {
		case c == nil:
		case c.due.After(now):
			wait = min(wait, c.due.Sub(now))
		case one == nil || o.turn.Before(one.turn):
			one, namespace = o, ns
		}
	}
	if one != nil {
		one.turn = now
	}
	return one, namespace, wait
}

// discover reads what the apiserver serves, if that is needed and not known or long ago.
// Part of it, where an aggregated API fails, is better than nothing. Roots that divide a
// resource which is served since then are counted anew.
func (w *Weigher) discover(now time.Time) error {
	w.mu.Lock()
	needed := collect.Any(w.weighings, func(_ types.UID, one *weighing) bool { return one.active() })
	fresh := len(w.served) > 0 && now.Sub(w.discovered) < discoverEvery
	w.mu.Unlock()
	if fresh || !needed {
		return nil
	}
	served, err := w.Served()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.discovered, w.failing, w.news = now, nil, true
	if len(served) > 0 {
		for _, one := range w.weighings {
			before, after := one.resources(w.served), one.resources(served)
			isNew := func(gvr schema.GroupVersionResource) bool { return !slices.Contains(before, gvr) }
			if len(w.served) > 0 && slices.ContainsFunc(after, isNew) {
				one.dueNow(now)
			}
		}
		w.served = served
	}
	if len(w.served) == 0 {
		w.failing = fmt.Errorf("discovering the resources that the apiserver serves: %w", err)
	}
	return w.failing
}

// counting is what is to be counted of a namespace.
type counting struct {
	namespace string
	resources []schema.GroupVersionResource // those that the manager may list, as far as is known
	names     bool                          // of the objects are keys
}

// begin marks a namespace as being counted.
func (w *Weigher) begin(one *weighing, namespace string) counting {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := one.counts[namespace]; c != nil {
		c.busy = true
	}
	resources := slices.DeleteFunc(one.resources(w.served), func(gvr schema.GroupVersionResource) bool { return one.forbidden[gvr] })
	return counting{namespace, resources, one.names}
}

// weigh counts the objects of a namespace. If that fails, it has what it had.
func (w *Weigher) weigh(ctx context.Context, one *weighing, next counting) {
	objects, names, err := w.count(ctx, one, next)
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	w.mu.Lock()
	c := one.counts[next.namespace]
	if c == nil { // it was deleted
		w.mu.Unlock()
		return
	}
	report := err != nil && c.err == nil
	c.busy, c.err, c.awaited = false, err, time.Time{}
	if err == nil {
		c.objects, c.names, c.known = objects, names, true
	}
	c.schedule(now)
	w.news = true
	w.mu.Unlock()
	w.poke.Set()
	if report {
		w.Log.Warn("weighing failed and will be tried again", "error", err)
	}
}

// count is the number of objects of some resources in a namespace, or their names if these are
// keys. Resources that the manager may not list do not count.
func (w *Weigher) count(ctx context.Context, one *weighing, next counting) (sum int64, names []string, err error) {
	for _, gvr := range next.resources {
		if err := w.Limiter.Wait(ctx); err != nil {
			return 0, nil, err
		}
		n := int64(0)
		if next.names {
			names, err = w.listNames(ctx, gvr, names)
		} else {
			n, err = w.list(ctx, gvr, next.namespace)
		}
		if err != nil && !apierrors.IsForbidden(err) {
			return 0, nil, fmt.Errorf("counting %s in namespace %s: %w", gvr.GroupResource(), next.namespace, err)
		}
		w.permitted(one, gvr, err == nil)
		sum += n
	}
	return sum, names, nil
}

// maxNames bounds the names that are known of a root's objects.
const maxNames = 10_000

// listNames adds the names of the objects of a resource.
func (w *Weigher) listNames(ctx context.Context, gvr schema.GroupVersionResource, names []string) ([]string, error) {
	page := metav1.ListOptions{Limit: 500}
	for {
		list, err := w.Metadata.Resource(gvr).List(ctx, page)
		if apierrors.IsNotFound(err) {
			return names, nil
		}
		if err != nil {
			return names, err
		}
		for i := range list.Items {
			names = append(names, list.Items[i].Name)
		}
		if page.Continue = list.Continue; page.Continue == "" || len(names) >= maxNames {
			return names, nil
		}
	}
}

// permitted notes whether the manager may list a resource. One that it may list by
// now is to be counted in all namespaces.
func (w *Weigher) permitted(one *weighing, gvr schema.GroupVersionResource, yes bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case !yes && !one.forbidden[gvr]:
		one.forbidden[gvr] = true
		one.retry = time.Now().Add(permissionEvery)
	case yes && one.retried[gvr]:
		one.dueNow(time.Now())
	}
	delete(one.retried, gvr)
}

// list returns the number of objects of a resource in a namespace.
func (w *Weigher) list(ctx context.Context, gvr schema.GroupVersionResource, namespace string) (int64, error) {
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
