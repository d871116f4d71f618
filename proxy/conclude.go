package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// conclude carries out an outcome, except for a restart.
func (x *exchange) conclude(o *outcome) {
	switch o.kind {
	case refuseRequest:
		x.refuse(o.reason, o.status)
	case respond:
		x.answer(o.status)
	case respondEmpty:
		x.head(o.code, nil, nil)
	case failUpstream:
		x.failed(o.err)
	case resetConnection:
		x.client.reset()
	}
}

// broken ends a truncated response so that the client notices.
func (x *exchange) broken() {
	if x.req.gone() == nil {
		x.plan.meters.UpstreamErrors.Inc()
		x.allowed.broken = true
	}
	panic(errAbort)
}

// refuse answers the request without the apiserver.
func (x *exchange) refuse(reason meshv1.Refusal, err *apierrors.StatusError) {
	x.allowed.unknown = reason != meshv1.RefusedFault
	workload := x.pod.unassigned
	if x.policy != nil {
		workload = x.policy.metrics
	}
	workload.Refused(x.pod.server.metrics, string(reason))
	x.answer(err)
}

func (x *exchange) answer(err *apierrors.StatusError) {
	if x.over {
		x.shed()
	}
	x.response.refuse(err)
}

// failed answers a request that the apiserver did not.
func (x *exchange) failed(err error) {
	switch {
	case x.ended():
		x.refuse(meshv1.RefusedEnded, status.Unavailable(1, "the request ended before it began: retry"))
		return
	case x.req.gone() != nil:
		x.code = metrics.ClientGone
		x.pod.abandoned(&x.client)
		panic(errAbort)
	}
	if errors.Is(err, relist.ErrPolicyChanged) {
		x.refuse(meshv1.RefusedEnded, status.Unavailable(1, "the policy of the pod changed while the request was read: retry"))
		return
	}
	if _, ok := errors.AsType[*upstream.BodyError](err); ok {
		x.refuse(meshv1.RefusedMalformed, status.BadRequest("the body cannot be read"))
		return
	}
	x.plan.meters.UpstreamErrors.Inc()
	x.answer(x.pod.noResponse(err))
}

// noResponse logs that the apiserver did not answer, and returns the refusal
// instead of a response.
func (p *Pod) noResponse(err error) *apierrors.StatusError {
	level := slog.LevelDebug
	if p.notices.due("upstream") {
		level = slog.LevelWarn
	}
	p.server.log.Log(context.Background(), level, "the apiserver did not answer", "pod", p.id, "error", err)
	const toLog = ": see the log of the agent on the pod's node"
	if upstream.IsTimeout(err) {
		return status.New(http.StatusGatewayTimeout, metav1.StatusReasonTimeout, 0, "the apiserver did not answer in time"+toLog)
	}
	return status.New(http.StatusBadGateway, "BadGateway", 0, "the apiserver did not answer"+toLog)
}
