package downstream

import (
	"net/http"
	"sync"
	"time"
)

// Guard is a writer that ends an HTTP/2 stream whose client stops reading. The deadlines
// of the connection do not detect that: its other streams may be alive.
type Guard struct {
	http.ResponseWriter
	Wrote bool // a body was written

	stall time.Duration
	timer *time.Timer
	armed bool // the timer runs, or has ended
	mu    sync.Mutex
	over  bool
}

// guards are pooled: each request needs one, and hardly any timer ever ends.
var guards = sync.Pool{New: func() any {
	g := &Guard{}
	g.timer = time.AfterFunc(time.Hour, g.fire)
	g.timer.Stop()
	return g
}}

// newGuard guards the stream of w for one request.
func newGuard(w http.ResponseWriter, stall time.Duration) *Guard {
	g := guards.Get().(*Guard)
	g.ResponseWriter, g.stall, g.Wrote, g.over = w, stall, false, false
	return g
}

func (g *Guard) arm() {
	g.armed = true
	g.timer.Reset(g.stall)
}

func (g *Guard) disarm() { g.armed = !g.timer.Stop() }

// Write implements http.ResponseWriter.
func (g *Guard) Write(p []byte) (int, error) {
	g.Wrote = true
	g.arm()
	defer g.disarm()
	return g.ResponseWriter.Write(p)
}

// FlushError is for http.ResponseController.
func (g *Guard) FlushError() error {
	g.arm()
	defer g.disarm()
	return http.NewResponseController(g.ResponseWriter).Flush()
}

// Flush implements http.Flusher.
func (g *Guard) Flush() { _ = g.FlushError() }

// Unwrap is for http.ResponseController.
func (g *Guard) Unwrap() http.ResponseWriter { return g.ResponseWriter }

func (g *Guard) fire() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.over {
		_ = http.NewResponseController(g.ResponseWriter).SetWriteDeadline(time.Unix(1, 0)) // at once
	}
}

// release ends the guard before net/http takes the writer back.
func (g *Guard) release() {
	g.mu.Lock()
	g.over = true
	g.mu.Unlock()
	if !g.armed { // else fire may be about to run
		g.ResponseWriter = nil
		guards.Put(g)
	}
}
