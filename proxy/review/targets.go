package review

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

const (
	// localTimeout bounds a connection to the application, forwardTimeout one to another
	// pod: the apiserver waits ten seconds for the answer by default.
	localTimeout   = 5 * time.Second
	forwardTimeout = time.Second
	// pingEvery and pingTimeout bound how long a connection to another pod is used that has
	// no other end any more: that of a lost node, or of an agent that is stopped. An agent whose
	// node is overloaded may take more than a second to answer.
	pingEvery     = time.Second
	pingTimeout   = 2 * time.Second
	maxAnswerHead = 64 << 10
)

// targets are the connections to the application and to other pods.
type targets struct {
	dial        func(ctx context.Context, network, addr string) (net.Conn, error)
	application target

	mu     sync.Mutex
	others map[string]*authority // by server name
}

// target sends requests to servers that are verified in one way.
type target struct {
	shared *http.Transport
	fresh  *http.Transport // with a connection for each request
}

// authority sends requests to pods that pool verifies.
type authority struct {
	pool *x509.CertPool
	target
}

func newTargets(dial func(ctx context.Context, network, addr string) (net.Conn, error)) *targets {
	t := &targets{dial: dial, others: map[string]*authority{}}
	// The connection leads to a process of the pod that has the certificate's key.
	t.application = t.target(localTimeout, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // see above
	return t
}

func (t *targets) target(timeout time.Duration, config *tls.Config) target {
	config.MinVersion = tls.VersionTLS12
	return target{shared: t.transport(timeout, config, true), fresh: t.transport(timeout, config, false)}
}

// transport returns a transport with a TLS configuration of its own, which it changes.
func (t *targets) transport(timeout time.Duration, config *tls.Config, shared bool) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return t.dial(ctx, network, addr)
		},
		TLSClientConfig: config.Clone(), TLSHandshakeTimeout: timeout, ForceAttemptHTTP2: true,
		DisableKeepAlives: !shared, DisableCompression: true, MaxResponseHeaderBytes: maxAnswerHead,
		IdleConnTimeout: downstream.Idle, MaxIdleConnsPerHost: 8,
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 128 << 10, MaxReceiveBufferPerConnection: 1 << 20, WriteByteTimeout: downstream.Stall},
	}
}

func (t target) close() {
	t.shared.CloseIdleConnections()
	t.fresh.CloseIdleConnections()
}

// other returns the target for other pods under a server name.
func (t *targets) other(name string, pool *x509.CertPool) target {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.others[name]
	if known != nil && known.pool.Equal(pool) {
		return known.target
	}
	if known != nil {
		known.close()
	}
	known = &authority{pool, t.target(forwardTimeout, &tls.Config{ServerName: name, RootCAs: pool})}
	known.shared.HTTP2.SendPingTimeout, known.shared.HTTP2.PingTimeout = pingEvery, pingTimeout
	t.others[name] = known
	return known.target
}

// keep drops the targets of other server names.
func (t *targets) keep(names map[string]*x509.CertPool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, known := range t.others {
		if names[name] == nil {
			known.close()
			delete(t.others, name)
		}
	}
}

// close closes the idle connections.
func (t *targets) close() {
	t.application.close()
	t.keep(nil)
}

// send sends a request with its body.
func (t target) send(r *http.Request, b *body) (*http.Response, error) {
	if !b.set(r) {
		return nil, errSent
	}
	if b.rest == nil {
		return t.shared.RoundTrip(r)
	}
	return t.fresh.RoundTrip(r)
}

// reach is send with a bound on the time until there is a connection. It reports whether there
// was one.
func (t target) reach(r *http.Request, b *body, within time.Duration) (resp *http.Response, reached bool, err error) {
	ctx, cancel := context.WithCancel(r.Context())
	timer := time.AfterFunc(within, cancel)
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) {
		timer.Stop()
		connected.Store(true)
	}})
	resp, err = t.send(r.WithContext(ctx), b)
	if err != nil {
		cancel() // else the body of the response needs ctx until r has ended
	}
	return resp, connected.Load(), err
}
