// Package relay joins two connections.
package relay

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// halfClosed is the idle time where one side has ended: whether it is there at all shows
// only when something is sent to it.
const halfClosed = 10 * time.Minute

// Both copies both ways until both sides have ended, one fails, or nothing comes
// from either for twice to three times the idle time.
func Both(down, up net.Conn, idle time.Duration) (sent, received int64) {
	var progress atomic.Int64
	var half atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() { sent = pump(up, down, idle, &progress, &half) })
	wg.Go(func() { received = pump(down, up, idle, &progress, &half) })
	wg.Wait()
	return sent, received
}

// pump copies one way, in the kernel where it can. The deadline is not moved with
// each read: when it comes, it is asked whether either way has moved since.
func pump(to, from net.Conn, idle time.Duration, progress *atomic.Int64, half *atomic.Bool) (total int64) {
	quiet := 0
	for before := progress.Load(); ; {
		_ = from.SetReadDeadline(time.Now().Add(idle))
		if half.Load() {
			idle = min(idle, halfClosed)
			_ = from.SetReadDeadline(time.Now().Add(idle))
		}
		n, err := io.Copy(to, from)
		total += n
		now := progress.Add(n)
		quiet++
		if now != before {
			quiet = 0
		}
		before = now
		switch {
		case err == nil: // this side has ended, the other may go on
			if w, ok := to.(interface{ CloseWrite() error }); ok && w.CloseWrite() == nil {
				half.Store(true)
				_ = to.SetReadDeadline(time.Now().Add(min(idle, halfClosed)))
				return total
			}
		case errors.Is(err, os.ErrDeadlineExceeded) && quiet < 2: // the other way's progress may be told only now
			continue
		}
		_ = to.Close()
		_ = from.Close()
		return total
	}
}
