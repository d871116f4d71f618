package proxy

import (
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// Bounds of HTTP/2.
const (
	maxStreams           = 512 // of one connection
	receivePerConnection = 256 << 10
	maxFrame             = 64 << 10
)

// newListener returns a listener of the pod's connections. Those of a passthrough are tunnelled.
func (p *Pod) newListener(l net.Listener) net.Listener {
	return p.conns.Bounded(l, "connections", func() func(*downstream.Conn) {
		pol := p.env.Policy.Load()
		if pol == nil || !pol.Passthrough {
			return nil
		}
		return func(c *downstream.Conn) { p.tunnel(c, pol) }
	})
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
