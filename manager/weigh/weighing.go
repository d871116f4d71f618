package weigh

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// weighing is of one root.
type weighing struct {
	groups  []v1alpha1.ResourceGroup
	again   bool // count more than once
	objects bool // keys are objects, so that namespaces weigh nothing
	// names: keys are the names of the objects themselves. They are counted as if in one
	// namespace, which is all.
	names  bool
	since  time.Time // when it was asked for
	turn   time.Time // when a count began last
	counts map[string]*count
	// forbidden are the resources that the manager may not list, as far as is known,
	// and retried those of them that it tries again.
	forbidden, retried map[schema.GroupVersionResource]bool
	retry              time.Time // when they are tried again
}

// count is of one namespace.
type count struct {
	objects  int64
	names    []string // of the objects, if these are keys
	known    bool
	err      error     // of the last attempt
	seen     time.Time // when the namespace was first seen
	awaited  time.Time // since when an attempt to count is awaited; zero if none is
	due      time.Time
	interval time.Duration
	busy     bool // it is being counted
}

// of sets the resources to count. If they changed, all namespaces are due.
func (o *weighing) of(groups []v1alpha1.ResourceGroup, now time.Time) (changed bool) {
	if equality.Semantic.DeepEqual(o.groups, groups) {
		return false
	}
	o.groups = groups
	o.forbidden, o.retried = map[schema.GroupVersionResource]bool{}, map[schema.GroupVersionResource]bool{}
	o.dueNow(now)
	return true
}

// resources returns what to count, of what the apiserver serves.
func (o *weighing) resources(served []*metav1.APIResourceList) []schema.GroupVersionResource {
	if o.names {
		return label.Listable(o.groups, served)
	}
	found, _ := label.Resolve(o.groups, served)
	return found
}

// in sets the namespaces that exist. New ones are due.
func (o *weighing) in(namespaces []string, now time.Time) (changed bool) {
	if o.names {
		namespaces = []string{metav1.NamespaceAll}
	}
	counts := make(map[string]*count, len(namespaces))
	for _, ns := range namespaces {
		c := o.counts[ns]
		if c == nil {
			c = &count{seen: now, awaited: now, due: now}
			changed = true
		}
		counts[ns] = c
	}
	o.counts = counts
	return changed
}

// equally returns equal weights of the objects whose names are keys.
func (o *weighing) equally() layout.Weights {
	out := layout.Weights{}
	for _, c := range o.counts {
		for _, name := range c.names {
			out[name] = 1
		}
	}
	return out
}

func (o *weighing) dueNow(now time.Time) {
	for _, c := range o.counts {
		c.awaited, c.due, c.interval = now, now, 0
	}
}

// complete reports whether each namespace was counted at least once, or tried.
func (o *weighing) complete() bool {
	return !collect.Any(o.counts, func(_ string, c *count) bool { return !c.known && c.err == nil })
}

// active reports whether there is anything to count, now or later.
func (o *weighing) active() bool { return !o.objects && (o.again || !o.complete()) }

// tryForbidden lists forbidden resources again in one namespace, once per
// permissionEvery: no event announces a new permission.
func (o *weighing) tryForbidden(now time.Time) {
	if now.Before(o.retry) || len(o.counts) == 0 {
		return
	}
	o.retry = now.Add(permissionEvery)
	maps.Copy(o.retried, o.forbidden)
	clear(o.forbidden)
	o.counts[slices.Min(slices.Collect(maps.Keys(o.counts)))].due = now
}

// urgent is the namespace to count next: of those that are due the newest, else the
// one that is due first.
func (o *weighing) urgent(now time.Time) (namespace string, best *count) {
	if !o.active() {
		return "", nil
	}
	for ns, c := range o.counts {
		if !c.busy && (best == nil || c.before(best, now)) {
			namespace, best = ns, c
		}
	}
	return namespace, best
}

func (c *count) before(other *count, now time.Time) bool {
	if !c.due.After(now) && !other.due.After(now) && !c.seen.Equal(other.seen) {
		return c.seen.After(other.seen)
	}
	return c.due.Before(other.due)
}

// schedule sets when a namespace that was just counted, or tried, is due again.
func (c *count) schedule(now time.Time) {
	waited := now.Sub(c.due)
	if c.err != nil {
		c.interval = 0
	}
	c.interval = min(max(weighAgain, 2*c.interval, queueShare*waited), weighEvery)
	c.due = now.Add(c.interval - c.interval/10 + rand.N(c.interval/5))
}
