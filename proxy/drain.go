package proxy

import (
	"context"
	"errors"
	"sync"
	"time"
)

// client-go takes a watch that ends without an event within its first second, by its own
// clock, for broken, and lists again.
const (
	// minWatch is the minimum age of a watch that draining ends.
	minWatch = 3 * time.Second
	// shortWatch is the minimum age of a watch without events that a policy ends.
	shortWatch = 1100 * time.Millisecond
)

// Drain ends everything of the pod without an effect on its clients, if another proxy
// accepts in place of this one. It accepts no more connections, closes each connection
// after its next response (HTTP/2: GOAWAY), and ends watches cleanly once clients take
// that for a usual end. Requests that arrive on open connections, idle ones included,
// are served: in HTTP/1 only a response can announce the end of a connection, and a
// request that arrives at a closed connection fails, unless it is a GET. When ctx is done,
// Drain cuts what is left and returns the error of ctx.
func (p *Pod) Drain(ctx context.Context) error {
	defer p.server.remove(p)
	defer p.lifetime.die()
	p.http.Stop()
	p.egress.Stop()
	p.reviews.Stop()
	others := make(chan error, 2)
	go func() { others <- p.egress.Drain(ctx) }()
	go func() { others <- p.reviews.Drain(ctx) }()
	defer context.AfterFunc(ctx, func() { p.lifetime.end(errShutdown) })()
	return errors.Join(p.http.Drain(ctx), <-others, <-others)
}

// Shutdown ends everything of the pod for good: as Drain, but watches, upgrades
// and other long answers end at once, and so do idle connections.
func (p *Pod) Shutdown(ctx context.Context) error {
	defer p.server.remove(p)
	defer p.lifetime.die()
	p.http.Stop()
	p.lifetime.end(errShutdown)
	p.http.CloseTunnels()
	p.egress.Close()
	p.reviews.Stop()
	var reviews sync.WaitGroup
	reviews.Go(func() { p.reviews.Shutdown(ctx) })
	defer reviews.Wait()
	err := p.http.Shutdown(ctx)
	if err != nil {
		p.http.Cut()
	}
	return err
}

// Unanswerable records that the pod's network is gone, so that no answer arrives any
// more. Without it the proxy waits for the ends of writes in flight until the kernel
// breaks their connections.
func (p *Pod) Unanswerable() { p.lifetime.endWriting(errUnanswerable) }

// retire ends a watch while the pod drains, once its client tolerates that.
func (x *exchange) retire(ctx context.Context, end context.CancelCauseFunc) {
	for {
		wait := minWatch
		if since := x.Resumption.BegunAt.Load(); since != 0 {
			wait -= time.Since(time.Unix(0, since))
		} else if x.Resumption.Behind { // a slow client must not hold up the takeover
			wait -= time.Since(x.start)
		}
		if wait <= 0 {
			end(errDraining)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// delayEnd delays the end of a watch that the policy ended, and on which nothing was sent,
// until its client tolerates that. Nothing arrives on the watch meanwhile.
func (x *exchange) delayEnd() {
	began := x.Resumption.BegunAt.Load()
	if x.response.bytes > 0 || began == 0 {
		return
	}
	select {
	case <-time.After(shortWatch - time.Since(time.Unix(0, began))):
	case <-x.Req.Ctx.Done():
	case <-x.pod.lifetime.done.Done():
	}
}
