package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// exchange is one request and its response.
type exchange struct {
	pod       *Pod
	req       request
	debug     bool
	start     time.Time
	holding             // of the pod's budgets
	allowed   allowance // of limits
	injection           // of faults
	decision            // of the stages under the policy in force
	response            // to the client

	// Of the exchange with the apiserver.
	sending  upstream.Request
	reply    upstream.Response
	received time.Time // when the head of reply came

	added     time.Duration // spent in the proxy
	accounted bool
}

// decision is the result of the stages for a request under one policy. A request that
// starts over begins with a new one.
type decision struct {
	policy *policy
	plan   *plan // nil: the gate has not passed the request
	ctx    context.Context
	// interrupt ends ctx of a request that may last: no more of the response is read.
	interrupt func()

	out       outgoing
	responses responseStages
	whole     []byte // not nil: the body of the response, as a stage made it

	lock     *lock.Lock // not nil: the request is about this lock
	exempt   bool       // neither narrowed nor fenced: a lock, or readable by every shard
	protocol string     // to which the connection changes, or empty
	would    string     // action of a policy without the dry run, or empty

	narrowed
	resumption
	staleList
	flight
}

// run serves the request.
func (x *exchange) run() {
	x.out.header = x.req.header // for the access line, if no stage runs
	refused := x.admit()
	defer x.finish()
	if refused != nil {
		x.refuse(meshv1.RefusedBound, refused)
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
	if v != nil && v != errAbort { //nolint:errorlint // a panic's value, compared as net/http does
		x.pod.server.metrics.Panics.Inc()
		x.pod.server.log.Error("panic", "pod", x.pod.id, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
		if !x.begun {
			x.refuse(meshv1.RefusedPanic, status.New(http.StatusInternalServerError, metav1.StatusReasonInternalError, 0, "internal error"))
			v = nil
		}
	}
	x.countInjected(x.policy, x.broke, x.version != "")
	x.account()
	x.allowed.ticket.Leave()
	if x.plan != nil {
		x.plan.meters.Bytes.Add(float64(x.bytes))
	}
	if v != nil {
		panic(errAbort)
	}
	if x.req.proto == proto2 && x.bytes > 0 {
		x.client.flush() // else net/http does, and waits for the client after the release
	}
}

// serve evaluates the request and answers it. It reports whether the policy changed
// meanwhile, so that the request must be evaluated anew.
func (x *exchange) serve() (again bool) {
	pol, clients := x.pod.policy.Load(), x.pod.clients.Load()
	if pol == nil || clients == nil {
		x.client.last = true // the policy may be passthrough
		x.refuse(meshv1.RefusedNoPolicy, status.Unavailable(1, "no policy for pod %s yet: if none comes, see whether the manager runs, and what the agent of the pod's node logs", x.pod.id))
		return false
	}
	end := x.evaluate(pol)
	if end == nil {
		if x.debug && (x.protocol != "" || x.plan.route == stream) {
			// The access line comes with the response, which may take long. This line
			// shows that the request passed, even if the agent is killed before.
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
	x.decision = decision{policy: pol, ctx: x.req.ctx, out: x.req.outgoing()}
	x.client.last = pol.passthrough // the connection is older than that
	if end := pol.gate.apply(x); end != nil {
		return end
	}
	x.plan = pol.plan(x.req.info)
	return x.plan.stages.apply(x)
}

// leave removes the request from the open connections and from the ledger.
func (x *exchange) leave() {
	if x.connected {
		x.connected = false
		x.pod.connects.leave(x)
	}
	x.resumption.leave()
}
