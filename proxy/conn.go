package proxy

import (
	"crypto/tls"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

// Bounds of HTTP/2.
const (
	maxStreams           = 512 // of one connection
	receivePerConnection = 256 << 10
)

// newHTTP returns the server of the pod's clients. Connections under a policy of passthrough are tunnels.
func (p *Pod) newHTTP() *downstream.Server {
	return downstream.NewServer(downstream.Config{
		Conns: p.accepting.conns, Refused: func() { p.bound("connections") }, Log: p.server.log, Handler: p, Streams: p.ServeStream,
		TLS: &tls.Config{
			// Asked for so that a client which relies on one hears that it is in vain.
			ClientAuth:                  tls.RequestClientCert,
			DynamicRecordSizingDisabled: true, // loopback: there is no packet to fit a record into
			GetCertificate:              func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.env.Leaf() },
		},
		MaxStreams: maxStreams, StreamWindow: pipeline.ReceivePerStream, ConnWindow: receivePerConnection,
		Tunnel: func() func(*downstream.Conn) {
			pol := p.env.Policy.Load()
			if pol == nil || !pol.Passthrough {
				return nil
			}
			return func(c *downstream.Conn) { p.tunnel(c, pol) }
		},
	})
}

// bound counts and reports that the pod has reached a bound.
func (p *Pod) bound(what string) {
	p.workload().Bounded(p.server.metrics, what)
	remedy := ""
	if what == pipeline.BoundWatches {
		remedy = ": raise agent.watchMemory of the chart"
	}
	p.notify(stages.ReasonBound, "pod %s has reached the proxy's bound on %s; what is beyond it is refused%s", p.env.ID, what, remedy)
}

// distrusted counts and reports a client of the pod that does not trust the mesh's CA.
func (p *Pod) distrusted() {
	p.workload().Counter(p.server.metrics.Distrusted).Inc()
	p.accepting.distrust.Store(time.Now().UnixNano())
	p.notify(stages.ReasonDistrust, "a client in pod %s does not trust the mesh's CA, and reaches no apiserver: let it verify the apiserver by /var/run/secrets/kubernetes.io/serviceaccount/ca.crt, and by no CA from its image, its environment, a Secret or the API", p.env.ID)
}

// distrustFor is how long a client that does not trust the mesh's CA is reported. It is longer than
// the kubelet waits before it restarts a container that keeps failing.
const distrustFor = 6 * time.Minute

// Distrusted reports whether a client of the pod did not trust the mesh's CA lately.
func (p *Pod) Distrusted() bool {
	at := p.accepting.distrust.Load()
	return at != 0 && time.Since(time.Unix(0, at)) < distrustFor
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
