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

// Both copies both ways until both sides have ended, one fails, or nothing comes
// from either for twice to three times the idle time.
func Both(down, up net.Conn, idle time.Duration) (sent, received int64) {
	var progress atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() { sent = pump(up, down, idle, &progress) })
	wg.Go(func() { received = pump(down, up, idle, &progress) })
	wg.Wait()
	return sent, received
}

// pump copies one way, in the kernel where it can. The deadline is not moved with
// each read: when it comes, it is asked whether either way has moved since.
func pump(to, from net.Conn, idle time.Duration, progress *atomic.Int64) (total int64) {
	quiet := 0
	for before := progress.Load(); ; {
		_ = from.SetReadDeadline(time.Now().Add(idle))
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
			if half, ok := to.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
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
