package proxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// tunnelIdle is how long a tunnel may say nothing in either direction. Peers that
// are gone are found by TCP keep-alives; nothing in Kubernetes itself lets a
// stream be idle for longer than four hours.
const tunnelIdle = 5 * time.Hour

// tunnels are the connections that are passed through opaque now.
type tunnels struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
}

func (t *tunnels) add(c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		t.open = map[net.Conn]struct{}{}
	}
	t.open[c] = struct{}{}
}

func (t *tunnels) remove(c net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, c)
}

func (t *tunnels) cut() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.open {
		_ = c.Close()
	}
}

// tunnel passes a connection through to the apiserver as it is, under a policy
// that says so.
func (p *Pod) tunnel(down net.Conn, pol *policy) {
	defer p.left()
	defer func() { _ = down.Close() }()
	p.tunnels.add(down)
	defer p.tunnels.remove(down)
	// Whoever takes passthrough away cuts what is in tunnels after that.
	if now := p.policy.Load(); !now.passthrough || p.done.Err() != nil {
		return
	}
	clients := p.clients.Load()
	if clients == nil {
		return
	}
	start := time.Now()
	up, err := clients.main.Tunnel(p.done)
	if err != nil {
		p.server.metrics.upstreamErrors.WithLabelValues(p.info.Namespace, pol.workload, pol.shard).Inc()
		p.server.log.Debug("upstream", "pod", p.id, "error", err)
		return
	}
	defer func() { _ = up.Close() }()
	m := p.server.metrics
	m.tunnels.WithLabelValues(p.info.Namespace, pol.workload, pol.shard).Inc()
	sent, received := relay(down, up, tunnelIdle)
	m.tunnelBytes.WithLabelValues(p.info.Namespace, pol.workload, pol.shard, "up").Add(float64(sent))
	m.tunnelBytes.WithLabelValues(p.info.Namespace, pol.workload, pol.shard, "down").Add(float64(received))
	p.server.log.LogAttrs(context.Background(), slog.LevelDebug, "passthrough",
		slog.String("pod", p.id),
		slog.String("uid", p.info.UID),
		slog.Int64("bytes_up", sent),
		slog.Int64("bytes_down", received),
		slog.Duration("duration", time.Since(start)),
	)
}

// relay copies both ways until both sides have ended, one fails, or nothing comes
// from either for twice to three times the idle time.
func relay(down, up net.Conn, idle time.Duration) (sent, received int64) {
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
