package shadow

import (
	"context"
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
	readTimeout = 10 * time.Second
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

// size returns what the write takes in memory until its change is known, in bytes.
func (w *Write) size() (n int) {
	for _, o := range []*Object{w.Body, w.After} {
		if o != nil {
			n += o.Size()
		}
	}
	return n
}

// creates reports whether there was no object: an update or patch may create it, too.
func (w *Write) creates() bool { return w.After != nil && w.After.Version == "" }

// change returns what the write would have changed of the object, which was read right after it.
// It is not ok if others have changed the object in between.
func (w *Write) change(now *Object) (change Change, ok bool) {
	switch {
	case w.After == nil:
		return Deletion(), true
	case w.creates():
		return Creation(w.Body, w.After), true
	case now == nil:
		return nil, false
	}
	change = Between(now, w.After)
	return change, len(change) == 0 || now.Version == w.After.Version
}

// of returns the uid of the object that the write changes, which was read right after it; empty if
// there is none yet.
func (w *Write) of(now *Object) string {
	switch {
	case w.creates():
		return ""
	case w.After != nil:
		return w.After.UID
	case now != nil:
		return now.UID
	}
	return ""
}

// Comparer compares the writes of one pod. Its zero value is ready to use, and it is safe for
// concurrent use.
type Comparer struct {
	mu      sync.Mutex
	pending map[string]*pending // by verb, resource and path
	running int                 // goroutines
	held    int                 // bytes
	reads   chan struct{}
	counts  counts
}

// pending is a comparison that goes on. Comparer.mu guards it, except for what never changes.
type pending struct {
	comparison
	key      string
	kind     kind
	read     func(context.Context) (*Object, error)
	count    func(Result)
	interval time.Duration
	held     int
	stop     context.CancelFunc
}

// Compare compares a write until ctx ends. If an earlier write of the same kind to the same object
// is still compared, both are compared together, and each field has a window of its own.
func (c *Comparer) Compare(ctx context.Context, w *Write) {
	if !c.reserve(w) {
		return
	}
	go func() {
		if ctx, p := c.begin(ctx, w); p != nil {
			c.poll(ctx, p)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.running--
	}()
}

// Note counts a write that is not to be compared.
func (c *Comparer) Note(r Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts.add(r)
}

// Report returns what was counted.
func (c *Comparer) Report() *meshv1.ShadowReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts.report()
}

// reserve reserves a goroutine, and memory until the change is known.
func (c *Comparer) reserve(w *Write) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running >= 2*maxPending || c.held+w.size() > maxHeld {
		c.uncompared(w.Count)
		return false
	}
	if c.pending == nil {
		c.pending, c.reads = map[string]*pending{}, make(chan struct{}, maxReads)
	}
	c.running++
	c.held += w.size()
	return true
}

// begin begins a comparison, or continues that of an earlier write, with an object as it is right
// after a write. It returns nil if that shows the result.
func (c *Comparer) begin(ctx context.Context, w *Write) (context.Context, *pending) {
	now, err := c.read(ctx, w.Read)
	at := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held -= w.size()
	if ctx.Err() != nil {
		return nil, nil
	}
	if err != nil {
		c.uncompared(w.Count)
		return nil, nil
	}
	p := &pending{
		comparison: comparison{window: w.Window}, key: w.Verb + " " + w.Resource + " " + w.Path, kind: kind{w.Group, w.Resource, w.Verb},
		read: w.Read, count: w.Count, interval: minInterval,
	}
	before := c.pending[p.key]
	if before != nil && !c.see(before, now, at) {
		before = nil
	}
	change, known := w.change(now)
	if !known || before == nil && len(c.pending) >= maxPending {
		c.uncompared(w.Count)
		return nil, nil
	}
	p.uid, p.deletion = w.of(now), w.After == nil
	if before != nil {
		p.wants, p.differed, p.interval = before.wants, before.differed, before.interval
		c.remove(before)
	}
	p.add(change, w.Verb == "update", at)
	if p.held = p.size(); c.held+p.held > maxHeld {
		c.uncompared(w.Count)
		return nil, nil
	}
	ctx, p.stop = context.WithCancel(ctx)
	c.held += p.held
	c.pending[p.key] = p
	if !c.see(p, now, at) {
		return nil, nil
	}
	return ctx, p
}

// poll reads the object until it shows all that the shadow wants, a later write continues the
// comparison, or ctx ends.
func (c *Comparer) poll(ctx context.Context, p *pending) {
	for next := c.next(p); ctx.Err() == nil; next = c.next(p) {
		select {
		case <-time.After(next):
		case <-ctx.Done():
		}
		now, err := c.read(ctx, p.read)
		if !c.seen(ctx, p, now, err) {
			return
		}
	}
}

// next returns how long to wait until the object is read again.
func (c *Comparer) next(p *pending) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	next := min(p.interval, time.Until(p.due()))
	p.interval = min(2*p.interval, maxInterval)
	return next
}

// seen compares an object that was read again, and reports whether the comparison goes on.
func (c *Comparer) seen(ctx context.Context, p *pending, now *Object, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now()
	switch {
	case c.pending[p.key] != p:
		return false
	case ctx.Err() != nil:
		c.remove(p)
		return false
	case err == nil:
		return c.see(p, now, at)
	case at.Before(p.due()):
		return true
	}
	c.uncompared(p.count)
	c.remove(p)
	return false
}

// see compares an object, and reports whether the comparison goes on. c.mu is held.
func (c *Comparer) see(p *pending, now *Object, at time.Time) bool {
	missing, lost := p.see(now, at)
	if len(missing) > 0 {
		c.counts.differ(p.kind, missing)
		p.count(Differed)
	}
	switch {
	case lost:
		c.uncompared(p.count)
	case len(p.wants) > 0:
		return true
	case !p.differed:
		c.counts.add(Agreed)
		p.count(Agreed)
	}
	c.remove(p)
	return false
}

// uncompared counts a write without a comparison. c.mu is held.
func (c *Comparer) uncompared(count func(Result)) {
	c.counts.add(Uncompared)
	count(Uncompared)
}

// remove ends a comparison. c.mu is held.
func (c *Comparer) remove(p *pending) {
	delete(c.pending, p.key)
	c.held -= p.held
	p.stop()
}

// read reads an object as it is; nil if there is none.
func (c *Comparer) read(ctx context.Context, read func(context.Context) (*Object, error)) (*Object, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	select {
	case c.reads <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-c.reads }()
	return read(ctx)
}
