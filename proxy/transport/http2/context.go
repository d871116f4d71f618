package http2

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// streamContext is the context of a stream. It has the values of its connection's. Unlike those of package context, it
// takes no allocation of its own, and the end of base does not end it.
type streamContext struct {
	base context.Context

	ended atomic.Bool
	mu    sync.Mutex
	done  chan struct{} // nil: nobody has asked for it
	after []afterFunc   // to call
	first [1]afterFunc  // of after
	added int
	child context.CancelFunc // of standard; nil: it was not called
}

type afterFunc struct {
	id   int
	call func()
}

// Deadline implements context.Context.
func (c *streamContext) Deadline() (time.Time, bool) { return time.Time{}, false }

// Value implements context.Context.
func (c *streamContext) Value(key any) any { return c.base.Value(key) }

// Err implements context.Context.
func (c *streamContext) Err() error {
	if c.ended.Load() {
		return context.Canceled
	}
	return nil
}

// Done implements context.Context.
func (c *streamContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.ended.Load() {
			close(c.done)
		}
	}
	return c.done
}

// AfterFunc is what package context asks for in contexts of others: f is called in a goroutine after the end, unless
// stop was called before. stop reports whether it prevented that.
func (c *streamContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended.Load() {
		go f()
		return func() bool { return false }
	}
	if c.after == nil {
		c.after = c.first[:0]
	}
	c.added++
	id := c.added
	c.after = append(c.after, afterFunc{id, f})
	return func() bool { return c.remove(id) }
}

func (c *streamContext) remove(id int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.after)
	c.after = slices.DeleteFunc(c.after, func(a afterFunc) bool { return a.id == id })
	return len(c.after) < before
}

// standard returns a context of package context that ends before calls of the stream fail. AfterFunc is later.
func (c *streamContext) standard() context.Context {
	ctx, cancel := context.WithCancel(c.base)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.child = cancel; c.ended.Load() {
		cancel()
	}
	return ctx
}

// cancel ends the context.
func (c *streamContext) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended.Swap(true) {
		return
	}
	if c.done != nil {
		close(c.done)
	}
	if c.child != nil {
		c.child()
	}
	for _, a := range c.after {
		go a.call()
	}
	c.after = nil
}
