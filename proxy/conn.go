package proxy

import (
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
)

// Bounds of HTTP/2, and of the kernel's buffers.
const (
	maxStreams           = 512 // of one connection
	receivePerConnection = 256 << 10
	maxFrame             = 64 << 10
	// sendBuffer is the kernel's buffer of each connection. By default it grows to
	// megabytes for a client that does not read.
	sendBuffer = 128 << 10
)

// listener accepts the connections of a pod. It closes those above the bounds, and hands
// those of a passthrough to a tunnel.
type listener struct {
	net.Listener
	pod   *Pod
	close func() error // once: its error would make http.Server.Shutdown fail
}

func (p *Pod) newListener(l net.Listener) *listener {
	own := &listener{Listener: l, pod: p, close: sync.OnceValue(l.Close)}
	p.conns.Listen(own)
	return own
}

func (l *listener) Close() error { return l.close() }

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		p := l.pod
		pol := p.env.Policy.Load()
		tunnel := pol != nil && pol.Passthrough
		c := p.conns.Accept(raw, tunnel)
		if c == nil {
			p.bound("connections")
			continue
		}
		if b, ok := raw.(interface{ SetWriteBuffer(int) error }); ok {
			_ = b.SetWriteBuffer(sendBuffer)
		}
		if !tunnel {
			return c, nil
		}
		go p.tunnel(c, pol)
	}
}

// bound counts and reports that the pod has reached a bound.
func (p *Pod) bound(what string) {
	p.workload().Bounded(p.server.metrics, what)
	p.notify(stages.ReasonBound, "pod %s has reached the proxy's bound on %s; what is beyond it is refused", p.env.ID, what)
}

// noticeInterval is the least time between two notices of one kind about a pod.
const noticeInterval = time.Minute

// notices limits the rate of notices about a pod. Reasons are a fixed set.
type notices struct{ sent sync.Map } // reason -> *rate.Sometimes

func (n *notices) due(reason string) (due bool) {
	sent, _ := n.sent.LoadOrStore(reason, &rate.Sometimes{Interval: noticeInterval})
	sent.(*rate.Sometimes).Do(func() { due = true })
	return due
}

// notify calls Config.Notify, and does not wait for it.
func (p *Pod) notify(reason, format string, args ...any) {
	if p.server.config.Notify != nil && p.notices.due(reason) {
		go p.server.config.Notify(p.env.Info, reason, fmt.Sprintf(format, args...))
	}
}
