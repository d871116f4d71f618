package proxy

import (
	"net/http"
	"sync"
	"time"
)

// guard ends an HTTP/2 stream whose client takes nothing of what is sent on it.
// The connection's deadlines do not see that: it may be alive with the others.
// The zero of *guard guards nothing.
type guard struct {
	stall time.Duration
	timer *time.Timer
	mu    sync.Mutex
	w     http.ResponseWriter // nil when the request is over
	armed bool                // the timer runs, or has ended
}

// guards are kept: each request needs one, and hardly any timer ever ends.
var guards = sync.Pool{New: func() any {
	g := &guard{}
	g.timer = time.AfterFunc(time.Hour, g.fire)
	g.timer.Stop()
	return g
}}

func newGuard(w http.ResponseWriter, stall time.Duration) *guard {
	g := guards.Get().(*guard)
	g.w, g.stall = w, stall
	return g
}

// arm and disarm surround what may wait for the client.
func (g *guard) arm() {
	if g != nil {
		g.armed = true
		g.timer.Reset(g.stall)
	}
}

func (g *guard) disarm() {
	if g != nil {
		g.armed = !g.timer.Stop()
	}
}

func (g *guard) fire() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.w != nil {
		_ = http.NewResponseController(g.w).SetWriteDeadline(time.Unix(1, 0)) // at once
	}
}

// release ends the guard before net/http takes the writer back.
func (g *guard) release() {
	if g == nil {
		return
	}
	g.mu.Lock()
	g.w = nil
	g.mu.Unlock()
	if !g.armed { // else fire may be about to run
		guards.Put(g)
	}
}
