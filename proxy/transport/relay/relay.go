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

// halfClosed is the idle time after one side has ended. Whether that side still exists shows
// only when something is sent to it.
const halfClosed = 10 * time.Minute

// Both copies in both directions until both sides have ended, one fails, or neither sends
// anything for two to three times the idle time.
func Both(down, up net.Conn, idle time.Duration) (sent, received int64) {
	var progress atomic.Int64
	var half atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() { sent = pump(up, down, idle, &progress, &half) })
	wg.Go(func() { received = pump(down, up, idle, &progress, &half) })
	wg.Wait()
	return sent, received
}

// pump copies in one direction, in the kernel where possible. It does not move the deadline
// with each read: at the deadline it checks for progress in either direction.
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
		case errors.Is(err, os.ErrDeadlineExceeded) && quiet < 2: // the other direction may report its progress only now
			continue
		}
		_ = to.Close()
		_ = from.Close()
		return total
	}
}
