package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

// exchange is one request and its response.
type exchange struct {
	pipeline.State
	pod      *Pod
	policy   *stages.Policy // in force when the request was evaluated last
	start    time.Time
	response response          // to the client
	counted  bool              // a write, in policy.Writes
	end      writes.Completion // read only for a connection into a pod or a service

	// Of the exchange with the apiserver.
	sending  upstream.Request
	reply    upstream.Response
	received time.Time // when the head of reply came

	added     time.Duration // spent in the proxy
	accounted bool
}

// run serves the request.
func (x *exchange) run() {
	x.Out.Header = x.Req.Header // for the access line, if no stage runs
	refused := x.chargeHead()
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
	x.Req.Body.Free()
	v := recover()
	if v != nil && v != errAbort { //nolint:errorlint // a panic's value, compared as net/http does
		x.pod.server.metrics.Panics.Inc()
		x.pod.server.log.Error("panic", "pod", x.pod.env.ID, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
		if !x.response.begun {
			x.refuse(meshv1.RefusedPanic, status.New(http.StatusInternalServerError, metav1.StatusReasonInternalError, 0, "internal error"))
			v = nil
		}
	}
	x.policy.CountInjected(&x.Injection, x.Stale.Version != "")
	x.account()
	x.Allowed.Ticket.Leave()
	x.meters().Bytes.Add(float64(x.response.bytes))
	if v != nil {
		panic(errAbort)
	}
}

// serve evaluates the request and answers it. It reports whether the policy changed
// meanwhile, so that the request must be evaluated anew.
func (x *exchange) serve() (again bool) {
	pol, clients := x.pod.env.Policy.Load(), x.pod.inForce.clients.Load()
	if pol == nil || clients == nil {
		x.response.client.last = true // the policy may be passthrough
		missing := "policy for pod " + x.pod.env.ID
		if pol != nil {
			missing = "address of the apiserver"
		}
		x.refuse(meshv1.RefusedNoPolicy, status.Unavailable(1, "no %s yet: if none comes, see whether the manager runs, and what the agent of the pod's node logs", missing))
		return false
	}
	x.policy, x.counted, x.end = pol, false, writes.NotSeen
	x.response.client.last = pol.Passthrough // the connection is older than that
	end := pol.Evaluate(&x.State)
	x.response.client.last = x.response.client.last || x.Last
	if end == nil {
		if x.Debug && (x.Protocol != "" || x.Plan.Delivery == pipeline.DeliveryStream) {
			// The access line comes with the response, which may take long. This line
			// shows that the request passed, even if the agent is killed before.
			x.pod.server.log.LogAttrs(context.Background(), slog.LevelDebug, "stream begins", x.accessAttrs()...)
		}
		end = x.send(clients)
	}
	switch {
	case end == nil:
	case end.Kind == pipeline.StartOver:
		x.leave()
		return true
	default:
		x.conclude(end)
	}
	return false
}

// leave removes the request from the open connections and from the ledger.
func (x *exchange) leave() {
	if x.Connected {
		x.Connected = false
		x.pod.inForce.connects.leave(x)
	}
	x.Resumption.Leave()
}

// chargeHead charges x to the budget of short requests before it is parsed. If that budget
// is exhausted, it parses x, and charges a request about a lock to the budget of these.
func (x *exchange) chargeHead() *apierrors.StatusError {
	x.Memory.Budget, x.Memory.Held = &x.Memory.Budgets.Held, x.Req.Weight()
	if x.Memory.Budget.Take(x.Memory.Held) {
		return nil
	}
	pol := x.pod.env.Policy.Load()
	if pol == nil || len(pol.Locks) == 0 || x.Memory.Held > pipeline.OwnLock/4 {
		return x.Memory.Exceeded()
	}
	if pol.Classify(&x.Req); x.Req.Malformed != nil {
		return x.Memory.Exceeded()
	}
	if plan := pol.Plan(&x.Req); plan.Urgent == nil || !plan.Urgent(x.Req.Info) {
		return x.Memory.Exceeded()
	}
	return x.Memory.Charge(&x.Memory.Budgets.Lock)
}

// shed frees memory before a request is answered 429, or cuts it off.
func (x *exchange) shed() {
	if x.pod.budgets.Refusing.Add(1) > pipeline.MaxRefusing {
		x.pod.budgets.Refusing.Add(-1)
		panic(errAbort)
	}
	x.Memory.Refusing = true
	x.strip(4 << 10)
}

// strip frees the head, except for some bytes of Accept. It may still be read on the way
// upstream.
func (x *exchange) strip(accept int) {
	kept := x.Req.Header.Get("Accept")
	x.response.client.Forget()
	x.Req.Forget()
	if kept != "" && accept > 0 {
		x.Req.Header = header.Fields{{Name: "Accept", Value: kept[:min(len(kept), accept)]}}
	}
	x.Out = pipeline.Outgoing{}
}

// release returns all that x has of the budgets.
func (x *exchange) release() {
	x.strip(0)
	x.Memory.Release()
}

// A request that its client abandons has cost a connection to the apiserver. Clients
// abandon some requests when deadlines are short, and all when they exit.
const (
	abandonedRate  = 100 // a second
	abandonedBurst = 1000
)
