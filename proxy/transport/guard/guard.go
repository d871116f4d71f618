// Package guard ends HTTP/2 streams that clients let stall.
package guard

import (
	"net/http"
	"sync"
	"time"
)

// Guard ends an HTTP/2 stream whose client takes nothing of what is sent on it.
// The connection's deadlines do not see that: it may be alive with the others.
// The zero of *Guard guards nothing.
type Guard struct {
	stall time.Duration
	timer *time.Timer
	mu    sync.Mutex
	w     http.ResponseWriter // nil when the request is over
	armed bool                // the timer runs, or has ended
}

// guards are kept: each request needs one, and hardly any timer ever ends.
var guards = sync.Pool{New: func() any {
	g := &Guard{}
	g.timer = time.AfterFunc(time.Hour, g.fire)
	g.timer.Stop()
	return g
}}

// New guards the stream of w for one request.
func New(w http.ResponseWriter, stall time.Duration) *Guard {
	g := guards.Get().(*Guard)
	g.w, g.stall = w, stall
	return g
}

// Arm and Disarm surround what may wait for the client.
func (g *Guard) Arm() {
	if g != nil {
		g.armed = true
		g.timer.Reset(g.stall)
	}
}

// Disarm is said when the client took it.
func (g *Guard) Disarm() {
	if g != nil {
		g.armed = !g.timer.Stop()
	}
}

func (g *Guard) fire() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.w != nil {
		_ = http.NewResponseController(g.w).SetWriteDeadline(time.Unix(1, 0)) // at once
	}
}

// Release ends the guard before net/http takes the writer back.
func (g *Guard) Release() {
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
