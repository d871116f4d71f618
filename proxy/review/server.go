// Package review serves the connections that the apiserver makes to a captured pod's webhook.
//
// The Server terminates TLS with the certificate of the webhook itself. It buffers up to
// 1 MiB of each review, parses its head, and decides with package route where it is
// answered: by the application in the pod, by a ready pod of the shard that owns the
// namespace, or by the Server itself. A pod that gets a forwarded review answers it, so that
// a review is forwarded once at most. What cannot be understood or forwarded is answered by
// the application, as it would be without the mesh. A review that another pod has accepted
// waits for its answer; one of more than 1 MiB is not sent twice. Connections that arrive
// while no certificate is usable, as in a takeover, are passed to the application unread.
package review

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/concurrent"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Decisions that are passed to Config.Count.
const (
	Local       = "local"       // answered by the application in the pod
	Forwarded   = "forwarded"   // answered by a pod of the owner
	Unreachable = "unreachable" // answered by the application, because no pod of the owner could be reached
	Allowed     = "allowed"     // allowed by the Server: the operator is not responsible
	Refused     = "refused"     // refused, because the client has too many in progress
)

// Config is what a Server needs from its caller. All fields are required.
type Config struct {
	Pod string // namespace/name
	// Dial connects from the pod's network namespace. addr is a literal IP and port.
	Dial  func(ctx context.Context, network, addr string) (net.Conn, error)
	Conns *downstream.Conns
	// Held counts the memory of reviews in progress in bytes.
	Held *bounds.Peers
	Log  *slog.Logger
	// Count is called for each request with one of the decisions.
	Count func(decision string)
}

const (
	// maxConnections bounds the connections of a listener, maxPerPeer those of one client. An
	// apiserver needs a few of HTTP/2, and opens one for each review that waits while an agent is
	// stopped. If it speaks HTTP/1.1, each review in progress needs one. It has 200 mutating
	// requests in progress at most by default.
	maxConnections = 512
	maxPerPeer     = 256
	// MaxOpen is the sum for the listeners of both IP families. The account of connections
	// must have as many of its own: it does not know the clients.
	MaxOpen    = 2 * maxConnections
	maxStreams = 256
	// readTimeout bounds the time in which a review is received. The apiserver waits thirty
	// seconds at most for the answer, and a read fails until then if the client has left.
	readTimeout = 40 * time.Second
	// weight is the memory of a request in bytes besides its body. What is kept of the body
	// takes up to bodyCopies copies while it is read.
	weight     = 48<<10 + upstream.BufferSize
	bodyCopies = 3
)

// Server serves the webhook of one pod. It is safe for concurrent use.
type Server struct {
	Config
	http        *downstream.Server
	proxy       *httputil.ReverseProxy
	targets     *targets
	avoided     avoided
	routes      atomic.Pointer[Routes]
	certificate certificate
	tunnels     concurrent.Set[*tunnel]
}

// NewServer returns a Server that passes connections unread until it has a certificate, and
// leaves all reviews to the application until it has routes.
func NewServer(c Config) *Server {
	s := &Server{Config: c, targets: newTargets(c.Dial)}
	s.http = downstream.NewServer(downstream.Config{
		Conns: c.Conns, Refused: s.refusedConn, Log: c.Log, Handler: http.HandlerFunc(s.serve),
		TLS:        &tls.Config{GetCertificate: s.certificate.get},
		MaxStreams: maxStreams, StreamWindow: 64 << 10, ConnWindow: 512 << 10,
		Tunnel: func() func(*downstream.Conn) {
			if _, usable := s.certificate.usableSince(); usable {
				return nil
			}
			return s.tunnel // to the application, unread
		},
	})
	s.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, Transport: router{s}, ErrorLog: s.http.ErrorLog, BufferPool: upstream.BufferPool{}, ErrorHandler: s.failed,
	}
	return s
}

// SetRoutes replaces the routes. With nil the application answers all reviews.
func (s *Server) SetRoutes(r *Routes) {
	s.routes.Store(r)
	if r == nil {
		s.targets.keep(nil)
		return
	}
	s.targets.keep(r.Authorities)
}

// Routes returns what reviews are routed by; nil if the application answers all.
func (s *Server) Routes() *Routes { return s.routes.Load() }

// SetCertificate sets the certificate in the application's directory. Clients are presented
// it, or one of the last before it, if a Probe has found that the application presents that.
func (s *Server) SetCertificate(c *tls.Certificate) { s.certificate.set(c) }

// ForgetCertificates forgets the certificates of a directory that the application does not use.
func (s *Server) ForgetCertificates() { s.certificate.forget() }

// refusedConn counts a connection above the bounds.
func (s *Server) refusedConn() { s.Conns.Reached("webhook connections") }

// Serve accepts connections on l, which it closes. Their local address is where the client
// connected to. It returns nil after Stop, and may be called for several listeners.
func (s *Server) Serve(l net.Listener) error {
	return s.http.Serve(listen.Limit(l, listen.Bounds{
		Total: maxConnections, PerPeer: maxPerPeer, Refused: func(listen.Refusal) { s.refusedConn() },
	}))
}

// Stop closes the listeners: no further connections are accepted.
func (s *Server) Stop() { s.http.Stop() }

// Drain waits, after Stop, until all connections have ended, each after its next review.
// When ctx is done, Drain cuts those that are left and returns its error.
func (s *Server) Drain(ctx context.Context) error {
	defer s.targets.close()
	return s.http.Drain(ctx)
}

// Shutdown closes all connections, after Stop. It waits for reviews in progress until ctx is
// done.
func (s *Server) Shutdown(ctx context.Context) {
	defer s.targets.close()
	_ = s.http.Shutdown(ctx)
	s.http.Close()
}

// serve serves one request.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	r.Trailer = nil // its names, which no webhook asks for, are not in the weight
	c := downstream.Of[*downstream.Conn](r.Context())
	held := s.Held.Open(addressOf(c.RemoteAddr()).Addr())
	defer held.Close()
	if !held.Take(weight + listen.HeadWeight(r.Header, 2)) {
		s.refuse(w, r)
		return
	}
	if r.Body != nil {
		r.Body = &charged{ReadCloser: r.Body, held: held, left: maxRead}
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(readTimeout))
	x := &request{local: addressOf(c.LocalAddr()), name: r.TLS.ServerName, received: r.Header.Get(meshv1.ForwardedHeader) != ""}
	s.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, x)))
}

// refuse answers a client that has too many reviews in progress. The apiserver tries again
// within the webhook's timeout.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request) {
	s.Count(Refused)
	s.Conns.Reached("reviews of one client")
	status.Write(w, r, status.New(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, 1, "the client has too many reviews in progress at pod %s", s.Pod))
}

func addressOf(a net.Addr) netip.AddrPort {
	at, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(at.AddrPort().Addr().Unmap(), at.AddrPort().Port())
}

// rewrite keeps the request as it came. RoundTrip says where it goes.
func rewrite(pr *httputil.ProxyRequest) {
	in, out := pr.In, pr.Out
	for _, k := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v := in.Header[k]; v != nil {
			out.Header[k] = v
		}
	}
	out.Header.Del(meshv1.ForwardedHeader)
	out.Header.Del("Expect") // the body is read here
	out.Host, out.URL.RawQuery, out.URL.ForceQuery = in.Host, in.URL.RawQuery, in.URL.ForceQuery
}

// failed answers a request that the application did not answer.
func (s *Server) failed(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil { // the client has disconnected
		panic(http.ErrAbortHandler)
	}
	if errors.Is(err, errBound) {
		s.refuse(w, r)
		return
	}
	s.Log.Debug("failed to answer a review", "pod", s.Pod, "error", err)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set(meshv1.ForwardedHeader, "unanswered") // another agent tries another pod
	w.WriteHeader(http.StatusBadGateway)
	_, _ = io.WriteString(w, "ctrlmesh: the webhook of pod "+s.Pod+" did not answer: "+reason(err)+"\n")
}

// reason returns the part of an error that the client of a webhook may see.
func reason(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Err != nil {
		return op.Err.Error()
	}
	return err.Error()
}
