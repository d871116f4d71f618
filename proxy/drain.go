package proxy

import (
	"bytes"
	"context"
	"errors"
	"time"
)

const (
	// minWatch is the least age of a watch that is ended by draining. client-go
	// takes one that ends without an event within its first second, by its own
	// clock and when it gets to look, for broken and lists again.
	minWatch = 3 * time.Second
	// cutGrace is for the ends of long answers to be written in, and for HTTP/2
	// connections to end after GOAWAY, which net/http gives a second.
	cutGrace = 2 * time.Second
)

// Drain ends everything of the pod so that its clients do not notice, given that
// another proxy accepts where this one did: it accepts no more, tells the client
// with each answer to open another connection (HTTP/2: GOAWAY), and ends watches
// cleanly as soon as clients take that for the end of a usual watch. Everything
// else goes on until it is over, and requests on open connections are served, also
// on those that were idle: on HTTP/1 only an answer can say that a connection ends,
// and a request that meets its end fails, unless it is a GET. What is left when ctx
// is done is cut, and its error returned.
func (p *Pod) Drain(ctx context.Context) error {
	defer p.server.remove(p)
	defer p.die()
	p.stopAccepting()
	others := p.drainEgress(ctx)
	// Not http.Server.Shutdown: that drops what it reads on HTTP/1.
	err := p.deserted(ctx)
	if err != nil {
		p.cut()
	}
	return errors.Join(err, <-others)
}

// Shutdown ends everything of the pod for good: as Drain, but watches, upgrades
// and other long answers end at once.
func (p *Pod) Shutdown(ctx context.Context) error {
	defer p.server.remove(p)
	defer p.die()
	p.stopAccepting()
	p.end(errShutdown)
	p.tunnels.cut()
	p.egress.Stop()
	p.egress.Cut()
	err := p.http.Shutdown(ctx)
	if err != nil {
		p.cut()
	}
	return err
}

// Unanswerable notes that the pod's network is gone, so that no answer arrives any more:
// the end of writes under way will not be seen. Without it they would be awaited until
// the kernel breaks their connections.
func (p *Pod) Unanswerable() { p.endWriting(errUnanswerable) }

func (p *Pod) stopAccepting() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drain()
	for _, l := range p.listeners {
		_ = l.Close()
	}
	p.listeners = nil
}

// deserted waits until no connection is open.
func (p *Pod) deserted(ctx context.Context) error {
	for p.open.Taken() > 0 {
		select {
		case <-p.empty:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (p *Pod) cut() {
	p.end(errShutdown)
	p.tunnels.cut()
	ctx, cancel := context.WithTimeout(context.Background(), cutGrace)
	defer cancel()
	_ = p.http.Shutdown(ctx)
	_ = p.http.Close()
}

// retire ends a watch while the pod drains, once a client can take it.
func (r *resumption) retire(ctx context.Context, end context.CancelCauseFunc) {
	for {
		wait := minWatch
		if since := r.settled.Load(); since != 0 {
			wait -= time.Since(time.Unix(0, since))
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

// delayEnd keeps the response of a watch that the policy ended until a client can take
// its end, where caches are to stay as they are. Nothing comes on it any more.
func (r *resumption) delayEnd(p *Pod, client context.Context) {
	began := r.settled.Load()
	if !p.policy.Load().KeepCaches || began == 0 {
		return
	}
	select {
	case <-time.After(minWatch - time.Since(time.Unix(0, began))):
	case <-client.Done():
	case <-p.done.Done():
	}
}

// endOfInitial is the annotation of the bookmark after which a client that asked
// for initial events has a whole cache. Ended before it, he starts anew.
var endOfInitial = []byte("k8s.io/initial-events-end")

// initialEvents looks for the end of the initial events in a watch.
type initialEvents struct{ tail []byte }

// passed reports whether the end was in what went by until p, in pieces.
func (i *initialEvents) passed(p []byte) bool {
	overlap := len(endOfInitial) - 1
	seam := append(i.tail, p[:min(len(p), overlap)]...)
	if bytes.Contains(p, endOfInitial) || bytes.Contains(seam, endOfInitial) {
		return true
	}
	if len(p) >= overlap {
		seam = p
	}
	i.tail = append(i.tail[:0], seam[max(0, len(seam)-overlap):]...)
	return false
}
