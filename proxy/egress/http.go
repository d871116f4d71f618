package egress

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/ctrlmesh/ctrlmesh/internal/listen"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

const (
	// expectTimeout is how long the proxy waits for 100 Continue before it sends the
	// body.
	expectTimeout = time.Second
	// requestWeight is the memory in bytes that a request takes in the server and the
	// transport, besides its head.
	requestWeight = 48<<10 + upstream.BufferSize
	// maxRefusing is how many requests above the bounds may be answered concurrently.
	// Further ones are cut without an answer.
	maxRefusing = 16
)

// request is one request and its answer.
type request struct {
	line
	w      http.ResponseWriter
	r      *http.Request
	cancel context.CancelCauseFunc
	flow   flow

	through  bool // the server is a forward proxy: the target keeps its host
	sent     time.Time
	took     time.Duration
	held     int64
	refusing bool // counted in Server.refusing
	awaits   bool // waits for the head of the answer
	failed   bool
}

type requestKey struct{}

func requestOf(ctx context.Context) *request {
	x, _ := ctx.Value(requestKey{}).(*request)
	return x
}

var (
	errCut   = errors.New("request refused by a newer policy")
	errReset = errors.New("injected reset")
)

// ServeHTTP serves one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := downstream.Of[*conn](r.Context())
	x := &request{line: line{s: s, c: c, protocol: c.target.protocol}, w: w, r: r}
	ctx, cancel := context.WithCancelCause(r.Context())
	x.cancel = cancel
	x.flow.cut = func() { cancel(errCut) }
	defer context.AfterFunc(c.Life, func() { cancel(nil) })() // net/http notices a closed connection only after the body was read
	r = r.WithContext(context.WithValue(ctx, requestKey{}, x))
	x.r = r
	defer x.finish()
	for _, stage := range stages {
		if !stage(x) {
			return
		}
	}
}

// stages are the decisions about a request, in order. One that does not pass the request on has answered it.
var stages = []func(*request) bool{
	(*request).charge,
	(*request).understand,
	(*request).enter,
	(*request).apply,
	(*request).inject,
	(*request).forward,
}

// charge accounts for the memory of the request.
func (x *request) charge() bool {
	if x.hold(requestWeight+int64(len(x.r.RequestURI))+listen.NamesWeight(x.r.Trailer), x.r.Header) {
		return true
	}
	x.verdict = VerdictBound
	if x.refusing = true; x.s.refusing.Add(1) > maxRefusing {
		panic(http.ErrAbortHandler)
	}
	x.answer(http.StatusTooManyRequests, 1, "pod "+x.s.Pod+" has too many requests under way")
	return false
}

// enter adds the request to those that a change of the policy may cut.
func (x *request) enter() bool {
	x.flow.asked = x.asked
	if x.connects() {
		if len(x.c.target.via) == maxVia {
			return x.malformed(http.StatusBadRequest, "this goes through too many proxies")
		}
		p, _ := x.s.Policy()
		x.flow.within = x.s.decrypts(p, x.asked)
		x.c.around.met = fault.Met{}
	}
	x.s.flows.Add(&x.flow)
	return true
}

// connects reports whether the request is for a tunnel.
func (x *request) connects() bool { return x.r.Method == http.MethodConnect }

// forward forwards the request and its answer.
func (x *request) forward() bool {
	if x.connects() {
		x.connect()
	} else {
		x.pass()
	}
	return true
}

// finish runs however the request ended.
func (x *request) finish() {
	v := recover()
	x.headed()
	x.s.flows.Remove(&x.flow)
	x.release()
	defer x.cancel(nil)
	if v != nil && v != http.ErrAbortHandler { //nolint:errorlint // a panic's value, compared as net/http does
		x.s.panicked(v)
	}
	if errors.Is(context.Cause(x.r.Context()), errCut) {
		x.verdict = VerdictCut
	}
	x.verdict = cmp.Or(x.verdict, VerdictFailed)
	x.done()
	gone := x.code == 0 && x.r.Context().Err() != nil
	o := limit.Outcome{Took: x.took, Unknown: gone || slices.Contains([]string{VerdictLimited, VerdictOpened, VerdictCut}, x.verdict)}
	o.Failed = x.failed || x.code >= 500 || x.code == http.StatusTooManyRequests
	x.end(o)
	if v != nil {
		panic(http.ErrAbortHandler)
	}
}

func (x *request) release() {
	x.s.Held.Give(x.held)
	x.held = 0
	if x.refusing {
		x.refusing = false
		x.s.refusing.Add(-1)
	}
}

// understand finds out what the request asks for, and of which host. It refuses requests
// that two servers could read differently.
func (x *request) understand() bool {
	asked, code, why := x.target()
	if why != "" {
		return x.malformed(code, why)
	}
	x.asked = append(x.asked, asked)
	if asked.Port != x.c.target.port {
		direct := asked
		direct.Scheme, direct.Port = x.c.target.scheme, x.c.target.port
		x.flow.direct = &direct
	}
	for _, host := range x.c.target.via {
		if host != asked.Host {
			asked.Host = host
			x.asked = append(x.asked, asked)
		}
	}
	p, _ := x.s.Policy()
	raw, _, _ := strings.Cut(x.r.RequestURI, "?")
	if !x.connects() && x.deep(p) && (!unambiguous(raw, x.r.URL.Path) || strings.Contains(raw, "#")) {
		return x.malformed(http.StatusBadRequest, "rules are about the path, and servers could read this one in two ways")
	}
	return true
}

// target returns what the request asks for, or why the request is refused.
func (x *request) target() (asked match.HTTP, code int, why string) {
	r, c := x.r, x.c
	asked = match.HTTP{Scheme: c.target.scheme, Port: c.target.port, Method: r.Method, Path: r.URL.Path, Header: r.Header}
	var port uint16
	if r.Host != "" {
		var ok bool
		if asked.Host, port, ok = authority(r.Host); !ok {
			return asked, http.StatusBadRequest, "invalid host"
		}
	}
	switch {
	case r.URL.Opaque != "": // "x:http://host/" would be forwarded as "http://host/"
		return asked, http.StatusBadRequest, "the target is neither a path nor an http URL"
	case x.connects():
		return x.connectTarget(asked, port)
	case r.ProtoMajor == 1 && r.URL.Host != "":
		if r.URL.Scheme != "http" || c.target.scheme != "http" || asked.Host == "" || r.URL.User != nil {
			return asked, http.StatusBadRequest, "a target with a host must be an http URL without user information"
		}
		x.through, asked.Port = true, cmp.Or(port, 80)
	case c.target.host != "" && asked.Host != c.target.host:
		return asked, http.StatusMisdirectedRequest, "the request is for another host than the TLS connection"
	}
	return asked, 0, ""
}

// connectTarget is target for a CONNECT.
func (x *request) connectTarget(asked match.HTTP, port uint16) (match.HTTP, int, string) {
	if x.r.ProtoMajor != 1 || x.c.target.scheme != "http" {
		return asked, http.StatusNotImplemented, "CONNECT is supported in HTTP/1.1 without TLS only"
	}
	if asked.Host == "" || port == 0 || x.r.URL.Path != "" {
		return asked, http.StatusBadRequest, "CONNECT needs a host and a port"
	}
	x.protocol = ProtocolConnect
	asked.Scheme, asked.Port, asked.Path, asked.Opaque = "https", port, "", true
	return asked, 0, ""
}

func (x *request) deep(p *Policy) bool {
	defer x.s.turn(p)()
	return slices.ContainsFunc(x.asked, func(r match.HTTP) bool { return p.deep(r.Host) })
}

// last closes the connection after this request while the server drains.
func (x *request) last() {
	if x.s.http.Draining() {
		x.w.Header()["Connection"] = []string{"close"}
	}
}

// malformed refuses the request and closes the connection. It returns false.
func (x *request) malformed(code int, why string) bool {
	x.verdict = VerdictMalformed
	x.w.Header()["Connection"] = []string{"close"}
	x.answer(code, 0, why)
	return false
}

// apply applies the rules. Those that match a CONNECT do not apply again to what is seen within its tunnel.
func (x *request) apply() bool {
	p, _ := x.s.Policy()
	var met fault.Met
	if x.connects() {
		met = x.c.around.met
	}
	refused := x.line.apply(p, &subject{flow: &x.flow, around: connect{met: met}, userAgent: x.r.UserAgent()})
	if refused != nil {
		x.answer(refused.code, refused.retry, refused.message)
	}
	return refused == nil
}

// inject injects the faults that come before the request is forwarded.
func (x *request) inject() bool {
	f := x.injecting
	if f == nil {
		return true
	}
	if f.Delay > 0 {
		x.ahead()
	}
	if !x.s.delay(x.r.Context(), f) {
		panic(http.ErrAbortHandler)
	}
	switch {
	case f.Reset:
		x.verdict, x.failed = VerdictFault, true
		x.reset()
	case f.Abort != nil:
		x.verdict = VerdictFault
		reason := cmp.Or(f.Abort.Reason, http.StatusText(f.Abort.Status))
		x.answer(f.Abort.Status, 0, fmt.Sprintf("%s: injected by FaultInjection %s/%s", reason, x.s.Namespace, f.Abort.Rule))
		return false
	}
	return true
}

// ahead reads a short body before the request is delayed: over HTTP/1, net/http notices
// that a client has disconnected only after the body was read.
func (x *request) ahead() {
	r := x.r
	if r.ProtoMajor != 1 || r.ContentLength <= 0 || r.ContentLength > upstream.BufferSize || r.Header["Expect"] != nil {
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
}

// reset resets the connection, or the stream of HTTP/2.
func (x *request) reset() {
	if x.r.ProtoMajor == 1 {
		x.c.Reset()
	}
	panic(http.ErrAbortHandler)
}

// answer sends an answer of the proxy itself. retry is for Retry-After, in seconds; 0: none.
func (x *request) answer(code int, retry int, message string) {
	x.code = code
	h := x.w.Header()
	h["Content-Type"] = []string{"application/json"}
	if retry > 0 {
		h["Retry-After"] = []string{strconv.Itoa(retry)}
	}
	if code == http.StatusNoContent || code == http.StatusNotModified {
		x.w.WriteHeader(code)
		return
	}
	body, _ := json.Marshal(map[string]string{"message": message})
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	x.w.WriteHeader(code)
	_, _ = x.w.Write(body)
}

// pass forwards the request and its answer.
func (x *request) pass() {
	if x.c.server.unverified != nil {
		x.failed, x.verdict, x.err = true, VerdictFailed, x.c.server.unverified
		x.answer(http.StatusBadGateway, 0, x.c.server.unverified.Error())
		return
	}
	if x.r.ProtoMajor == 1 {
		_ = http.NewResponseController(x.w).EnableFullDuplex()
	}
	x.plain()
	if x.awaits = x.r.ProtoMajor == 1; x.awaits {
		x.c.await()
	}
	x.sent = time.Now()
	x.s.proxy.ServeHTTP(x.w, x.r)
}

// plain keeps net/http from adding headers that the server did not send.
func (x *request) plain() {
	for _, k := range []string{"Content-Type", "Date"} {
		x.w.Header()[k] = nil
	}
}

// rewrite builds the request to the original destination of the connection.
func rewrite(pr *httputil.ProxyRequest) {
	x := requestOf(pr.In.Context())
	out := pr.Out
	for _, k := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Proxy-Authorization", "Proxy-Connection"} {
		if v := pr.In.Header[k]; v != nil {
			out.Header[k] = v
		}
	}
	if httpguts.HeaderValuesContainsToken(out.Header["Upgrade"], "h2c") { // the proxy could not see the requests after an upgrade
		for _, k := range []string{"Upgrade", "Connection", "Http2-Settings"} {
			out.Header.Del(k)
		}
	}
	out.Trailer = nil
	if in := pr.In; out.Body != nil && len(in.Trailer) > 0 && slices.Contains([]string{http.MethodPost, http.MethodPut, http.MethodPatch}, in.Method) {
		out.Body, out.Trailer = &trailed{out.Body, in, out}, in.Trailer.Clone()
	}
	out.Host = pr.In.Host
	out.URL.RawQuery, out.URL.ForceQuery = pr.In.URL.RawQuery, pr.In.URL.ForceQuery
	if x.through {
		return
	}
	out.URL.Scheme, out.URL.Host = x.c.target.scheme, x.c.target.to.String()
	if target := pr.In.RequestURI; strings.HasPrefix(target, "/") && !strings.HasPrefix(target, "//") && out.URL.RequestURI() != target {
		// Keep the target as it came: Go would encode it differently.
		out.URL.Opaque, _, _ = strings.Cut(target, "?")
	}
}

// trailed passes on the fields that follow the body of a request. The server writes to the map of the request that came
// when it ends that, while the transport may still read the one that it sends, so they have a map each. The transport
// reads the first bytes of bodies of other methods beside the head, and their fields are dropped.
type trailed struct {
	io.ReadCloser
	in, out *http.Request
}

// Read implements io.Reader. The server fills in the fields before it returns io.EOF.
func (t *trailed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if err == io.EOF {
		maps.Copy(t.out.Trailer, t.in.Trailer)
	}
	return n, err
}

// forwarded is Transport.Proxy. It returns the original destination for requests to a
// forward proxy, so that their targets keep the host.
func forwarded(r *http.Request) (*url.URL, error) {
	if x := requestOf(r.Context()); x != nil && x.through {
		return &url.URL{Scheme: "http", Host: x.c.target.to.String()}, nil
	}
	return nil, nil
}

// roundTripper uses the transport of the request's connection.
type roundTripper struct{}

func (roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	return requestOf(r.Context()).c.server.transport.RoundTrip(r)
}

// answered handles the head of the server's answer (ReverseProxy.ModifyResponse).
func answered(resp *http.Response) error {
	x := requestOf(resp.Request.Context())
	x.took = time.Since(x.sent)
	x.headed()
	if !x.hold(0, resp.Header) {
		return downstream.ErrTooMuch
	}
	switched := resp.StatusCode == http.StatusSwitchingProtocols && resp.Request.Header.Get("Upgrade") != ""
	if err := final(resp); err != nil && !switched {
		return err
	}
	x.code, x.verdict = resp.StatusCode, VerdictPassed
	x.plain()
	if switched {
		x.c.Upgraded.Store(true)
		_ = x.c.Conn.SetDeadline(time.Time{})
		return nil
	}
	x.last()
	if v := resp.Header["Proxy-Authenticate"]; v != nil {
		x.w.Header()["Proxy-Authenticate"] = v
	}
	if f := x.injecting; f != nil {
		if x.s.lift(f); f.ResetAfter {
			x.verdict, f.Broke = VerdictFault, true
			return errReset
		}
		if !f.Harmless() {
			resp.Body = &faultyBody{resp.Body, x}
		}
	}
	return nil
}

// faultyBody injects faults into the body of an answer.
type faultyBody struct {
	io.ReadCloser
	x *request
}

func (b *faultyBody) Read(p []byte) (int, error) {
	return b.x.s.faulty(b.x.r.Context(), b.x.injecting, p, b.ReadCloser.Read)
}

// failed answers a request whose server did not answer (ReverseProxy.ErrorHandler).
func failed(w http.ResponseWriter, r *http.Request, err error) {
	x := requestOf(r.Context())
	x.c.Upgraded.Store(false) // answered may have set it, and the protocol that the server chose was not the requested one
	if errors.Is(err, errReset) {
		x.reset()
	}
	if r.Context().Err() != nil { // the client has disconnected, or the request was cut
		x.failed, x.code = true, 0
		panic(http.ErrAbortHandler)
	}
	x.failed, x.verdict, x.err = true, VerdictFailed, err
	x.answer(http.StatusBadGateway, 0, "the server did not answer: "+reason(err))
}

// reason returns the part of an error that a pod may see: what its own connect would
// have returned.
func reason(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Err != nil {
		return op.Err.Error()
	}
	return err.Error()
}
