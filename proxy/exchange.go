package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault/events"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/guard"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

// exchange is one request and its answer.
type exchange struct {
	pod    *Pod
	policy *policy
	plan   *plan

	w   http.ResponseWriter
	r   *http.Request
	ctx context.Context
	// interrupt ends ctx, of what may last: nothing more of the answer is read.
	interrupt func()
	debug     bool

	req request
	out outgoing

	lock     *lock.Lock // not nil: the request is about this lock
	exempt   bool       // neither narrowed nor fenced: a lock, or readable by every shard
	protocol string     // that the connection is to change to, or empty

	narrow        *narrowStage   // not nil: the answer is filtered
	shardSelector string         // that the apiserver was sent for it
	objects       *filter.Reader // the answer
	filtered      int64          // bytes that it keeps of the pod's account
	judged        atomic.Bool    // it had objects that could have been foreign

	fence     *fenceStage // not nil: the answer tells whose the object is
	counted   bool        // in policy.writes
	connected bool        // in pod.connects
	end       completion  // of a connection into a pod or a service
	polls     bool        // the answer may tell who holds a lock

	would string // what a policy that is no dry run would have done, or empty

	allowed allowance

	faults   *fault.Faults // nil: none
	unharmed string        // why the events of a watch were not harmed that were to be
	decided  bool          // on them
	broke    bool          // the answer was broken off
	version  string        // that a stale list is asked for at, or empty
	fresh    string        // the query without it

	ticket *ticket // of a list or watch
	gap    *gap    // what faults keep from a watch's client
	fills  bool    // the answer fills a client's cache from nothing

	close   bool           // the client is to ask no more on this connection
	budget  *account       // of the pod's, that the request is in
	held    int64          // bytes of it
	over    bool           // the request is beyond it
	initial *initialEvents // not nil: a watch whose initial events have not ended
	settled atomic.Int64   // Unix nanoseconds since when a watch's client has all it began with

	start, sent, head time.Time
	added             time.Duration // spent in the proxy
	code              int
	bytes             int64
	wrote, accounted  bool
	refusing          bool // one of the maxRefusing
	guard             *guard.Guard
}

// ServeHTTP serves one request of the pod.
func (p *Pod) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x := &exchange{
		pod:   p,
		w:     w,
		r:     r,
		req:   newRequest(r),
		start: time.Now(),
		debug: p.server.log.Enabled(context.Background(), slog.LevelDebug),
	}
	if c := connOf(r); c != nil {
		c.enter()
		defer c.leave()
	}
	if r.ProtoMajor == 2 {
		x.guard = guard.New(w, p.stall)
	}
	x.out.header = x.req.header // for the access line, if that is all
	refused := x.admit()
	defer x.finish()
	if refused != nil {
		x.refuse("bound", refused)
		return
	}
	for x.serve() {
	}
}

// finish runs however the request ended.
func (x *exchange) finish() {
	defer x.release()
	x.leave()
	if x.counted { // a panic came first
		x.answered(nil, errShutdown)
	}
	x.req.body.free()
	v := recover()
	if v != nil && v != http.ErrAbortHandler { //nolint:errorlint // a panic's value, compared as net/http does
		x.pod.server.metrics.panics.Inc()
		x.pod.server.log.Error("panic", "pod", x.pod.id, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
		if !x.wrote {
			x.refuse("panic", status.New(http.StatusInternalServerError, metav1.StatusReasonInternalError, 0, "internal error"))
			v = nil
		}
	}
	x.countFaults()
	x.account()
	x.allowed.ticket.Leave()
	if x.plan != nil {
		x.plan.meters.bytes.Add(float64(x.bytes))
	}
	if v != nil {
		panic(http.ErrAbortHandler)
	}
	if x.req.major == 2 && x.bytes > 0 {
		x.flush() // or net/http does, and waits for the client when all was given back
	}
}

// serve evaluates the request and answers it. It reports whether the policy changed
// meanwhile, so that the request must be evaluated anew.
func (x *exchange) serve() (again bool) {
	pol, clients := x.pod.policy.Load(), x.pod.clients.Load()
	if pol == nil || clients == nil {
		x.close = true // the policy may be to see no request at all
		x.refuse("no_policy", status.Unavailable(1, "no policy for pod %s yet: if none comes, see whether the manager runs, and what the agent of the pod's node logs", x.pod.id))
		return false
	}
	end := x.evaluate(pol)
	if end == nil {
		if x.debug && (x.protocol != "" || x.plan.route == stream) {
			// Its access line comes with the answer, which may take long. This line
			// shows that the request passed here, even if the agent is killed before.
			x.pod.server.log.LogAttrs(context.Background(), slog.LevelDebug, "stream begins", x.accessAttrs()...)
		}
		end = x.send(clients)
	}
	switch {
	case end == nil:
	case end.kind == startOver:
		x.leave()
		return true
	default:
		x.conclude(end)
	}
	return false
}

// evaluate applies the stages of a policy.
func (x *exchange) evaluate(pol *policy) *outcome {
	x.policy = pol
	x.close = pol.passthrough // the connection is older than that
	if end := pol.gate.apply(x); end != nil {
		return end
	}
	x.plan = pol.plan(x.req.info)
	x.ctx, x.lock, x.exempt, x.fence, x.polls = x.req.ctx, nil, false, nil, false
	x.narrow, x.shardSelector = nil, ""
	x.out = x.req.outgoing()
	return x.plan.stages.apply(x)
}

// leave ends what the request takes part in under its policy.
func (x *exchange) leave() {
	if x.connected {
		x.connected = false
		x.pod.connects.leave(x)
	}
	if x.ticket != nil {
		x.pod.ledger.over(x.ticket, x.gap)
		x.pod.ledger.leave(x.ticket)
		x.ticket = nil
	}
}

// send sends the request upstream and the response down.
func (x *exchange) send(clients *clients) *outcome {
	client := clients.main
	if x.lock != nil {
		client = clients.lock
	}
	if x.protocol != "" {
		x.upgrade(client, x.protocol)
		return nil
	}
	return x.forward(client)
}

func (x *exchange) upstreamRequest() *upstream.Request {
	target := x.out.path
	if x.out.query != "" || x.req.bareQuery {
		target += "?" + x.out.query
	}
	return &upstream.Request{
		Method: x.req.method,
		Target: target,
		Host:   x.req.host,
		Header: http.Header(x.out.header),
		Body:   x.out.body,
		Length: x.out.length,
		Sent:   func() { x.sent = time.Now() },
	}
}

func (x *exchange) forward(client *upstream.Client) *outcome {
	send := client.Short
	if x.plan.route == stream {
		send = client.Stream
		var cancel context.CancelCauseFunc
		x.ctx, cancel = context.WithCancelCause(x.ctx)
		x.interrupt = func() { cancel(nil) }
		defer x.interrupt()
		defer context.AfterFunc(x.pod.done, func() { cancel(errShutdown) })()
		if ctx := x.ctx; x.req.info.Verb == "watch" {
			defer context.AfterFunc(x.pod.draining, func() { x.retire(ctx, cancel) })()
		}
	}
	if x.gathers() {
		if err := x.gather(); err != nil {
			x.failed(&upstream.BodyError{Err: err})
			return nil
		}
	}
	write := x.plan.route == short && x.plan.key.writes() && x.lock == nil
	if write {
		if !x.depart() {
			return restart
		}
		// Nothing of a connection that is closed leaves any more: Pod.Quiet.
		if gone := x.req.gone(); gone != nil {
			x.answered(nil, gone)
			x.failed(gone)
			return nil
		}
	}
	x.allowed.waits()
	resp, err := send(x.ctx, x.upstreamRequest())
	if err == nil && x.version != "" {
		resp, err = x.refresh(resp, send)
	}
	x.answered(resp, err)
	x.req.body.free()
	if err != nil {
		x.end = x.completion(nil, err)
		x.failed(err)
		return nil
	}
	defer func() { _ = resp.Body.Close() }()
	if write && x.req.gone() != nil {
		x.failed(x.req.gone())
		return nil
	}
	x.head = time.Now()
	if x.fence != nil && resp.StatusCode == http.StatusOK {
		x.answerObject(resp)
		return nil
	}
	if x.lock != nil {
		x.answerLock(resp)
		return nil
	}
	if x.polls && resp.StatusCode == http.StatusOK {
		x.observePoll(resp)
	}
	if x.narrow != nil && !x.filter(resp) {
		return nil
	}
	if x.plan.stale != nil {
		x.remember(resp)
	}
	x.harmWatch(resp)
	x.sendHead(resp)
	if x.plan.route == stream {
		if whole := x.copyStream(resp.Body); whole {
			x.end = x.completion(resp, nil)
		}
	} else {
		x.copyShort(resp)
		x.noteMethod()
	}
	maps.Copy(x.w.Header(), resp.Trailer) // announced in sendHead
	return nil
}

// gathers reports whether gather has anything to do: a stage may have read the body.
func (x *exchange) gathers() bool {
	return x.plan.route == short && x.req.length != 0 && !x.req.body.begun()
}

// gather waits for the body, or as much of it as a buffer takes, before the apiserver
// hears of the request. A client that announces bodies which never come takes room here,
// and none of what the apiserver shares out among all its clients.
func (x *exchange) gather() error {
	err := x.req.body.begin()
	x.out.body = x.req.body.reader()
	return err
}

// sendHead writes the answer's status and headers, and keeps the books that
// depend on them.
func (x *exchange) sendHead(resp *http.Response) {
	x.resetAfter()
	stripHopByHop(resp.Header)
	h := x.w.Header()
	maps.Copy(h, resp.Header)
	for k := range resp.Trailer {
		h.Add("Trailer", k)
	}
	if x.ticket != nil && x.fills && resp.StatusCode == http.StatusOK {
		x.pod.ledger.listed(x.ticket)
	}
	x.final(h)
	x.wrote, x.code = true, resp.StatusCode
	x.w.WriteHeader(resp.StatusCode)
	x.added = x.sent.Sub(x.start) + time.Since(x.head)
	x.plan.meters.added.Observe(x.added.Seconds())
	if x.plan.route == stream {
		x.flush() // a client of a quiet watch must see that it began
		if x.initial == nil {
			x.settled.Store(time.Now().UnixNano())
		}
		x.account()
	}
}

// copyShort copies a body in large pieces.
func (x *exchange) copyShort(resp *http.Response) {
	buf := upstream.Buffer()
	defer buf.Free()
	for {
		n, err := fill(resp.Body, buf.B)
		if n > 0 && !x.write(buf.B[:n]) {
			return
		}
		if err == io.EOF { //nolint:errorlint // a wrapped one is a body cut short
			return
		}
		if err != nil {
			x.broken()
		}
	}
}

// fill reads until p is full or r has no more. Unlike io.ReadFull it keeps a
// truncated body apart from its end.
func fill(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}

// copyStream copies a body and flushes what each read gave. While nothing comes
// it holds a small buffer; it takes a large one while more comes than fits. It reports
// whether the client got the whole body.
func (x *exchange) copyStream(r io.Reader) (whole bool) {
	if m := x.plan.meters.watches; m != nil && x.code == http.StatusOK {
		m.Inc()
		defer m.Dec()
	}
	small := make([]byte, 4<<10)
	var big *upstream.Buf
	defer func() {
		if big != nil {
			big.Free()
		}
	}()
	for {
		p := small
		if big != nil {
			p = big.B
		}
		n, err := r.Read(p)
		if n > 0 {
			if !x.write(p[:n]) {
				return false
			}
			x.flush()
			if x.initial != nil && x.initial.passed(p[:n]) {
				x.initial = nil
				x.noteMethod()
				x.settled.Store(time.Now().UnixNano())
			}
		}
		switch {
		case err == io.EOF:
			return true
		case err != nil && x.ended():
			x.linger()
			return false // a clean end: the client resumes
		case errors.Is(err, events.ErrCut):
			panic(http.ErrAbortHandler)
		case err != nil:
			x.end = x.completion(nil, err)
			x.broken()
		case n == len(small) && big == nil:
			big = upstream.Buffer()
		case n < len(small) && big != nil:
			big.Free()
			big = nil
		}
	}
}

// ended tells whether the proxy itself ended the request.
func (x *exchange) ended() bool {
	cause := context.Cause(x.ctx)
	return errors.Is(cause, errPolicyChanged) || errors.Is(cause, errShutdown) || errors.Is(cause, errDraining)
}

// write sends p to the client; false when it is gone.
func (x *exchange) write(p []byte) bool {
	if x.faults != nil {
		return x.spoil(p)
	}
	return x.pass(p)
}

func (x *exchange) pass(p []byte) bool {
	x.guard.Arm()
	n, err := x.w.Write(p)
	x.guard.Disarm()
	x.bytes += int64(n)
	return err == nil
}

// flush sends what was written to the client.
func (x *exchange) flush() {
	if f, ok := x.w.(http.Flusher); ok {
		x.guard.Arm()
		f.Flush()
		x.guard.Disarm()
	}
}

// broken ends an answer that stopped half way so that the client sees that it
// did.
func (x *exchange) broken() {
	if x.req.gone() == nil {
		x.plan.meters.upstreamErrors.Inc()
		x.allowed.broken = true
	}
	panic(http.ErrAbortHandler)
}

// refuse answers the request without the apiserver.
func (x *exchange) refuse(reason string, err *apierrors.StatusError) {
	x.allowed.unknown = reason != "fault"
	owner := x.pod.nobody
	if x.policy != nil {
		owner = x.policy.owner
	}
	owner.refusals.of(reason, func(string) prometheus.Counter {
		return owner.counter(x.pod.server.metrics.refusals, reason)
	}).Inc()
	x.answer(err)
}

func (x *exchange) answer(err *apierrors.StatusError) {
	if x.over {
		x.shed()
	}
	x.final(x.w.Header())
	x.wrote, x.code = true, int(err.ErrStatus.Code)
	x.guard.Arm()
	x.bytes += int64(status.Write(x.w, x.r, err))
	x.guard.Disarm()
}

// failed answers for an apiserver that did not.
func (x *exchange) failed(err error) {
	switch {
	case x.ended():
		x.refuse("ended", status.Unavailable(1, "the request ended before it began: ask again"))
		return
	case x.req.gone() != nil:
		x.code = statusClientGone
		x.abandoned()
		panic(http.ErrAbortHandler)
	}
	if errors.Is(err, errPolicyChanged) {
		x.refuse("ended", status.Unavailable(1, "the policy of the pod changed while the request came: send it again"))
		return
	}
	if _, ok := errors.AsType[*upstream.BodyError](err); ok {
		x.refuse("malformed", status.BadRequest("the body cannot be read"))
		return
	}
	x.answer(x.silence(err))
}

// silence is what to tell for an apiserver that did not answer.
func (x *exchange) silence(err error) *apierrors.StatusError {
	x.plan.meters.upstreamErrors.Inc()
	level := slog.LevelDebug
	if x.pod.notices.due("upstream") {
		level = slog.LevelWarn
	}
	x.pod.server.log.Log(context.Background(), level, "the apiserver did not answer", "pod", x.pod.id, "error", err)
	const toLog = ": the agent of the pod's node logs why"
	if upstream.IsTimeout(err) {
		return status.New(http.StatusGatewayTimeout, metav1.StatusReasonTimeout, 0, "the apiserver did not answer in time"+toLog)
	}
	return status.New(http.StatusBadGateway, "BadGateway", 0, "the apiserver did not answer"+toLog)
}

// badAnswer answers for an answer that cannot be passed on.
func (x *exchange) badAnswer(about string, err error) {
	x.plan.meters.upstreamErrors.Inc()
	x.answer(status.New(http.StatusBadGateway, "BadGateway", 0, "the answer about %s cannot be read: %v", about, err))
}

// account counts and logs the request, once: when it is over, or when its answer
// starts if that may go on for hours.
func (x *exchange) account() {
	if x.accounted {
		return
	}
	x.accounted = true
	x.answeredWithin()
	if x.plan != nil {
		x.plan.meters.count(x.code)
	}
	if x.debug {
		x.log()
	}
}

// accessAttrs are what an access line says of the request: no header but the audit
// id, nor a query, nor a body.
func (x *exchange) accessAttrs() []slog.Attr {
	attrs := make([]slog.Attr, 0, 15)
	attrs = append(attrs,
		slog.String("audit_id", bounded(x.out.header.get(auditHeader))),
		slog.String("pod", x.pod.id),
		slog.String("uid", x.pod.info.UID),
	)
	if x.policy != nil {
		attrs = append(attrs, slog.String("shard", x.policy.shard))
	}
	if i := x.req.info; i != nil {
		attrs = append(attrs,
			slog.String("verb", i.Verb),
			slog.String("resource", i.Resource),
			slog.String("subresource", i.Subresource),
			slog.String("namespace", i.Namespace),
			slog.String("name", i.Name),
		)
	}
	return attrs
}

// log writes the access line.
func (x *exchange) log() {
	attrs := append(x.accessAttrs(),
		slog.Int("code", x.code),
		slog.Duration("added", x.added),
		slog.Int64("bytes", x.bytes),
	)
	if x.would != "" {
		attrs = append(attrs, slog.String("dry_run", x.would))
	}
	if x.allowed.refusedBy != "" {
		attrs = append(attrs, slog.String("limited_by", x.allowed.refusedBy))
	}
	if x.faults != nil {
		attrs = append(attrs, slog.Any("faults", x.faults.Rules))
		if x.unharmed != "" {
			attrs = append(attrs, slog.String("unharmed", x.unharmed))
		}
	}
	x.pod.server.log.LogAttrs(context.Background(), slog.LevelDebug, "request", attrs...)
}

func bounded(id string) string { return id[:min(len(id), 64)] }
