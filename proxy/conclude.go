package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/usage"
)

// conclude carries out an outcome, except for a restart.
func (x *exchange) conclude(o *pipeline.Outcome) {
	switch o.Kind {
	case pipeline.Refuse:
		x.refuse(o.Reason, o.Status)
	case pipeline.Respond:
		x.answer(o.Status)
	case pipeline.RespondEmpty:
		x.response.head(o.Code, nil, nil)
	case pipeline.FailUpstream:
		x.failed(o.Err)
	case pipeline.ResetConnection:
		x.response.client.reset()
	}
}

// broken ends a truncated response so that the client notices.
func (x *exchange) broken() {
	if x.Req.Gone() == nil {
		x.Plan.Meters.UpstreamErrors.Inc()
		x.Allowed.Broken = true
	}
	panic(errAbort)
}

// refuse answers the request without the apiserver.
func (x *exchange) refuse(reason meshv1.Refusal, err *apierrors.StatusError) {
	x.Allowed.Unknown = reason != meshv1.RefusedFault
	x.workload().Refused(x.pod.server.metrics, string(reason))
	x.answer(err)
}

// workload returns the series of the workload under the policy that evaluated x last.
func (x *exchange) workload() *metrics.Workload {
	if x.policy != nil {
		return x.policy.Tally.Metrics
	}
	return x.pod.workload()
}

// meters returns the series that x counts in, even if it was refused before its plan was known.
func (x *exchange) meters() *metrics.Meters {
	if x.Plan != nil {
		return x.Plan.Meters
	}
	w, verb, resource := x.workload(), metrics.Unclassified, ""
	if i := x.Req.Info; i != nil {
		if verb = i.Verb; i.IsResourceRequest {
			resource = w.Resource(i.Resource)
		}
	}
	return x.pod.server.metrics.Meters(w, verb, resource)
}

func (x *exchange) answer(err *apierrors.StatusError) {
	if x.Memory.Over {
		x.shed()
	}
	x.response.refuse(&x.Req, err)
}

// failed answers a request that the apiserver did not.
func (x *exchange) failed(err error) {
	switch {
	case x.ended():
		x.refuse(meshv1.RefusedEnded, status.Unavailable(1, "the request ended before it began: retry"))
		return
	case x.Req.Gone() != nil:
		x.response.code = metrics.ClientGone
		if !x.pod.accepting.dropped.Allow() {
			x.pod.bound("abandoned requests")
			if c := x.response.client.conn; c != nil {
				_ = c.Close()
			}
		}
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
	x.Plan.Meters.UpstreamErrors.Inc()
	x.answer(x.pod.noResponse(err))
}

// noResponse logs that the apiserver did not answer, and returns the refusal
// instead of a response.
func (p *Pod) noResponse(err error) *apierrors.StatusError {
	level := slog.LevelDebug
	if p.notices.due("upstream") {
		level = slog.LevelWarn
	}
	p.server.log.Log(context.Background(), level, "the apiserver did not answer", "pod", p.env.ID, "error", err)
	const toLog = ": see the log of the agent on the pod's node"
	if upstream.IsTimeout(err) {
		return status.New(http.StatusGatewayTimeout, metav1.StatusReasonTimeout, 0, "the apiserver did not answer in time"+toLog)
	}
	return status.New(http.StatusBadGateway, "BadGateway", 0, "the apiserver did not answer"+toLog)
}

// account counts and logs the request, once: when it has ended, or when its response
// begins if that may last for hours.
func (x *exchange) account() {
	if x.accounted {
		return
	}
	x.accounted = true
	x.ReportResult(x.response.code, x.received)
	x.meters().Count(x.response.code)
	if c := x.Req.Cluster; c != "" {
		x.workload().InMemberCluster(x.pod.server.metrics, c, x.response.code)
	}
	x.countOutcome()
	x.countUsage()
	x.policy.CountWithheld(&x.State)
	if x.Debug {
		x.log()
	}
}

// countOutcome counts how the request ended, and how long the apiserver took to answer it. A
// watch or a connection into a pod may wait for events before it is answered.
func (x *exchange) countOutcome() {
	x.pod.env.Observations.Outcomes.Count(x.response.code)
	if x.Plan != nil && x.Plan.Delivery == pipeline.DeliveryShort && !x.received.IsZero() && !x.received.Before(x.sending.Sent) {
		took := x.received.Sub(x.sending.Sent)
		x.pod.env.Observations.Outcomes.Answered(took)
		x.Plan.Meters.Apiserver.Add(took.Seconds())
	}
}

// countUsage counts the request if the pod's pass unchanged, and the apiserver has answered it.
func (x *exchange) countUsage() {
	i := x.Req.Info
	if i == nil || !i.IsResourceRequest || x.received.IsZero() || x.Req.Cluster != "" || !x.policy.Observes() {
		return
	}
	x.pod.env.Observations.Usage.Add(&usage.Request{
		GroupResource: schema.GroupResource{Group: i.APIGroup, Resource: i.Resource},
		Verb:          i.Verb, Subresource: i.Subresource, Namespace: i.Namespace, Name: i.Name,
		Code: x.response.code, Bytes: int(x.response.bytes), Sent: x.sending.Sent,
		Own: i.Namespace == x.pod.env.Info.Namespace, Indivisible: x.indivisible(),
	}, x.received)
}

// indivisible reports whether the request lists or watches in encodings of which none can be divided.
func (x *exchange) indivisible() bool {
	if v := x.Req.Info.Verb; v != "list" && v != "watch" {
		return false
	}
	_, ok := filter.Accept(x.Req.Header.Values("Accept"))
	return !ok
}

// accessAttrs returns the attributes of the request in an access line: no header except
// the audit id, no query and no body.
func (x *exchange) accessAttrs() []slog.Attr {
	attrs := make([]slog.Attr, 0, 16)
	attrs = append(attrs,
		slog.String("audit_id", pipeline.Bounded(x.Out.Header.Get(pipeline.AuditHeader))),
		slog.String("pod", x.pod.env.ID),
		slog.String("uid", x.pod.env.Info.UID),
	)
	if x.policy != nil {
		attrs = append(attrs, slog.String("shard", x.policy.Shard))
	}
	if i := x.Req.Info; i != nil {
		attrs = append(attrs,
			slog.String("verb", i.Verb),
			slog.String("group", i.APIGroup),
			slog.String("resource", i.Resource),
			slog.String("subresource", i.Subresource),
			slog.String("namespace", i.Namespace),
			slog.String("name", i.Name),
		)
	}
	if c := x.Req.Cluster; c != "" {
		attrs = append(attrs, slog.String("cluster", pipeline.Bounded(c)))
	}
	return attrs
}

// log writes the access line.
func (x *exchange) log() {
	attrs := append(x.accessAttrs(),
		slog.Int("code", x.response.code),
		slog.Duration("added", x.added),
		slog.Int64("bytes", x.response.bytes),
	)
	if x.Would != "" && x.policy.Would != nil {
		attrs = append(attrs, slog.String("dry_run", x.Would))
	}
	if x.Allowed.RefusedBy != "" {
		attrs = append(attrs, slog.String("limited_by", x.Allowed.RefusedBy))
	}
	if x.Injection.Faults != nil {
		attrs = append(attrs, slog.Any("faults", x.Injection.Faults.Rules))
		if x.Injection.Skipped != "" {
			attrs = append(attrs, slog.String("fault_skipped", x.Injection.Skipped))
		}
	}
	x.pod.server.log.LogAttrs(context.Background(), slog.LevelDebug, "request", attrs...)
}
