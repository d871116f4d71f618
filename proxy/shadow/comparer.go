package shadow

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const (
	// maxPending bounds the writes of a pod that wait to be compared, and maxHeld what is kept of
	// them in bytes. Others are not compared.
	maxPending = 128
	maxHeld    = 16 << 20
	// maxReads bounds the objects that are read at the same time.
	maxReads = 4
	// Objects are read at growing intervals between these.
	minInterval = 100 * time.Millisecond
	maxInterval = 5 * time.Second
)

// Result is how a write of a shadow ended.
type Result string

// Results of writes.
const (
	Agreed     Result = "agreed"
	Differed   Result = "differed"
	Refused    Result = "refused"
	Uncompared Result = "uncompared"
)

// Write is a write of a shadow that the apiserver has accepted as a dry run.
type Write struct {
	Verb, Group string
	Resource    string // with the subresource, such as "deployments/status"
	Path        string // of the object
	// Body of a creation; nil if it is not known.
	Body *Object
	// After is the object as it would be now; nil if it would be deleted.
	After *Object
	// Read reads the object as it is; nil if there is none.
	Read func(context.Context) (*Object, error)
	// Window is how long others have for the same change.
	Window time.Duration
	// Count counts the result.
	Count func(Result)
}

func (w *Write) size() int {
	n := 0
	for _, o := range []*Object{w.Body, w.After} {
		if o != nil {
			n += o.Size()
		}
	}
	return n
}

// Comparer compares the writes of one pod. Its zero value is ready to use, and it is safe for
// concurrent use.
type Comparer struct {
	mu          sync.Mutex
	pending     map[string]*pending
	held        int
	reads       chan struct{}
	counts      map[Result]uint64
	differences map[kind]*difference
}

// pending is a write that waits to be compared.
type pending struct {
	write    *Write
	deadline time.Time
	replace  context.CancelFunc
}

// kind is what differences are counted by.
type kind struct{ group, resource, verb string }

type difference struct {
	fields []string
	writes uint64
}

// Compare compares a write until ctx ends. A later write of the same kind to the same object takes
// its place, within the same window.
func (c *Comparer) Compare(ctx context.Context, w *Write) {
	key := w.Verb + " " + w.Resource + " " + w.Path
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending == nil {
		c.pending, c.reads = map[string]*pending{}, make(chan struct{}, maxReads)
	}
	p := &pending{write: w, deadline: time.Now().Add(w.Window)}
	if before := c.pending[key]; before != nil {
		p.deadline = before.deadline
		before.replace()
		c.remove(key, before)
	}
	if len(c.pending) >= maxPending || c.held+w.size() > maxHeld {
		c.count(w, Uncompared, nil)
		return
	}
	ctx, p.replace = context.WithDeadline(ctx, p.deadline.Add(maxInterval))
	c.pending[key] = p
	c.held += w.size()
	go func() {
		defer p.replace()
		result, missing := c.await(ctx, p)
		c.end(ctx, key, p, result, missing)
	}()
}

// Note counts a write that is not to be compared.
func (c *Comparer) Note(w *Write, r Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count(w, r, nil)
}

// end counts the result of a write, unless another one has replaced it.
func (c *Comparer) end(ctx context.Context, key string, p *pending, r Result, missing Change) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending[key] != p {
		return
	}
	c.remove(key, p)
	if !errors.Is(ctx.Err(), context.Canceled) {
		c.count(p.write, r, missing)
	}
}

// remove forgets a write. c.mu is held.
func (c *Comparer) remove(key string, p *pending) {
	delete(c.pending, key)
	c.held -= p.write.size()
}

// await reads the object until it shows the change, or the window is over.
func (c *Comparer) await(ctx context.Context, p *pending) (Result, Change) {
	now, err := c.read(ctx, p.write)
	if err != nil {
		return Uncompared, nil
	}
	change, ok := p.write.change(now)
	if !ok {
		return Uncompared, nil
	}
	for interval := minInterval; ; interval = min(2*interval, maxInterval) {
		left := time.Until(p.deadline)
		if err == nil {
			if result, missing := p.write.compare(change, now); result != Differed || left <= 0 {
				return result, missing
			}
		}
		if left <= 0 {
			return Uncompared, nil
		}
		select {
		case <-time.After(min(interval, left)):
		case <-ctx.Done():
			return Uncompared, nil
		}
		now, err = c.read(ctx, p.write)
	}
}

// read reads the object as it is; nil if there is none.
func (c *Comparer) read(ctx context.Context, w *Write) (*Object, error) {
	select {
	case c.reads <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-c.reads }()
	return w.Read(ctx)
}

// change returns what the write would have changed of the object, which was read right after it.
// It is not ok if others have changed the object in between.
func (w *Write) change(now *Object) (Change, bool) {
	switch {
	case w.After == nil:
		return nil, true
	case w.creates():
		return Creation(w.Body, w.After), true
	case now == nil:
		return nil, false
	}
	change := Between(now, w.After)
	return change, len(change) == 0 || now.Version == w.After.Version
}

// creates reports whether there was no object: an update or patch may create it, too.
func (w *Write) creates() bool { return w.After.Version == "" }

// compare returns how the write ends if the object remains as it is now, and which part of a change
// it lacks.
func (w *Write) compare(change Change, now *Object) (Result, Change) {
	switch {
	case w.After == nil && (now == nil || now.Deleting):
		return Agreed, nil
	case w.After == nil, w.creates() && now == nil:
		return Differed, nil
	case now == nil, !w.creates() && now.UID != w.After.UID:
		return Uncompared, nil // others have deleted it
	}
	if missing := change.Missing(now, w.Window); len(missing) > 0 {
		return Differed, missing
	}
	return Agreed, nil
}

// count counts a write. c.mu is held.
func (c *Comparer) count(w *Write, r Result, missing Change) {
	if c.counts == nil {
		c.counts, c.differences = map[Result]uint64{}, map[kind]*difference{}
	}
	c.counts[r]++
	w.Count(r)
	if r != Differed {
		return
	}
	k := kind{w.Group, w.Resource, w.Verb}
	d := c.differences[k]
	if d == nil {
		if len(c.differences) >= meshv1.MaxShadowDifferences {
			return
		}
		d = &difference{}
		c.differences[k] = d
	}
	d.writes++
	d.fields = slices.Concat(d.fields, missing.Paths())
	slices.Sort(d.fields)
	d.fields = slices.Compact(d.fields)
	d.fields = slices.Clip(d.fields[:min(len(d.fields), meshv1.MaxShadowFields)])
}

// Report returns what was counted.
func (c *Comparer) Report() *meshv1.ShadowReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := &meshv1.ShadowReport{Agreed: c.counts[Agreed], Differed: c.counts[Differed], Refused: c.counts[Refused], Uncompared: c.counts[Uncompared]}
	for k, d := range c.differences {
		out.Differences = append(out.Differences, &meshv1.ShadowDifference{Group: k.group, Resource: k.resource, Verb: k.verb, Fields: d.fields, Writes: d.writes})
	}
	slices.SortFunc(out.Differences, func(a, b *meshv1.ShadowDifference) int {
		return cmp.Or(strings.Compare(a.GetGroup(), b.GetGroup()), strings.Compare(a.GetResource(), b.GetResource()), strings.Compare(a.GetVerb(), b.GetVerb()))
	})
	return out
}
