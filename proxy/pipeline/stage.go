package pipeline

import (
	"errors"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// Stage is one decision about a request on its way up. It edits what goes upstream, or
// ends the request.
type Stage interface {
	Apply(x *State) *Outcome
}

// Stages are applied in turn. The first that ends the request is the last.
type Stages []Stage

// Apply applies the stages to a request.
func (s Stages) Apply(x *State) *Outcome {
	for _, one := range s {
		if end := one.Apply(x); end != nil {
			return end
		}
	}
	return nil
}

// Plan is how a policy handles one verb of one resource.
type Plan struct {
	Key match.Kind
	// Stages edit the request in turn. The first that ends the request is the last.
	Stages   Stages
	Delivery Delivery
	// Urgent reports whether a request may be about a lock, by its head; nil: none is.
	Urgent func(*RequestInfo) bool
	Meters *metrics.Meters
	// Activity counts what the pod does to the objects; nil: nothing is counted.
	Activity Activity
}

// Activity counts what a pod does to the objects of a resource. Its methods are called once
// the apiserver has answered with success.
type Activity interface {
	// Written counts a write.
	Written(x *State)
	// Watched counts a watch until over is called; over may be nil.
	Watched(x *State) (over func())
}

// BadResponse answers instead of a response that cannot be read. Above a bound of the proxy
// it refuses: that says nothing about the apiserver.
func (p *Plan) BadResponse(about string, err error) *Outcome {
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok && refused.ErrStatus.Code == http.StatusTooManyRequests {
		return Refusal(refused)
	}
	p.Meters.UpstreamErrors.Inc()
	return &Outcome{Kind: Respond, Status: status.New(http.StatusBadGateway, "BadGateway", 0, "the response about %s cannot be read: %v", about, err)}
}

// Delivery is how a response is passed on.
type Delivery int

const (
	// DeliveryShort is for a response that ends soon, and is logged then.
	DeliveryShort Delivery = iota
	// DeliveryStream is for a response that may last for hours. It is flushed after every read,
	// and logged when it begins.
	DeliveryStream
)

// DeliveryOf returns the delivery of the responses to a verb of a resource.
func DeliveryOf(key match.Kind) Delivery {
	switch {
	case key.Verb == "watch", key.Verb == "proxy",
		key.Group == "" && key.Subresource == "proxy",
		key.Subresource == "proxy" && !key.Writes(), // of another group it may be a watch in another cluster
		key.Group == "" && key.Resource == "pods" && key.Subresource == "log":
		return DeliveryStream
	}
	return DeliveryShort
}

// responseStage edits a response on its way down, or ends the exchange.
type responseStage interface {
	Respond(x *State, r *upstream.Response) *Outcome
}

// responseStages are those that the stages of a request added, in their order.
type responseStages struct {
	n    int
	all  [4]responseStage
	last responseStage // nil: there is none
}

// Add appends a stage.
func (s *responseStages) Add(one responseStage) {
	s.all[s.n] = one
	s.n++
}

// Only removes all stages before, and adds one.
func (s *responseStages) Only(one responseStage) {
	s.n, s.last = 0, nil
	s.Add(one)
}

// Last adds the stage that comes after all others.
func (s *responseStages) Last(one responseStage) { s.last = one }

// Respond applies the stages to a response.
func (s *responseStages) Respond(x *State, r *upstream.Response) *Outcome {
	for _, one := range s.all[:s.n] {
		if end := one.Respond(x, r); end != nil {
			return end
		}
	}
	if s.last != nil {
		return s.last.Respond(x, r)
	}
	return nil
}

// Outcome says how a stage ends a request. A nil outcome passes it to the next stage.
type Outcome struct {
	Kind   outcomeKind
	Reason meshv1.Refusal
	Status *apierrors.StatusError // of a refusal
	Code   int                    // of an empty response
	Err    error                  // of an exchange with the apiserver
}

// outcomeKind is one of the ways.
type outcomeKind int

// Ways in which a stage ends a request.
const (
	Refuse          outcomeKind = iota // with a status, counted by reason
	Respond                            // with a status, in place of the apiserver's response
	RespondEmpty                       // with a status code alone
	FailUpstream                       // the apiserver did not answer: err
	ResetConnection                    // without a response
	StartOver                          // the policy changed: evaluate the request anew
)

// Outcomes that are always the same.
var (
	Restart = &Outcome{Kind: StartOver}
	Reset   = &Outcome{Kind: ResetConnection}
)

// Refusal returns the outcome of a refusal, nil if there is none.
func Refusal(status *apierrors.StatusError) *Outcome {
	if status == nil {
		return nil
	}
	return RefusalFor(refusalReason(status), status)
}

// RefusalFor is Refusal with a given reason.
func RefusalFor(reason meshv1.Refusal, status *apierrors.StatusError) *Outcome {
	return &Outcome{Reason: reason, Status: status}
}

// Failure returns the outcome of an exchange with the apiserver that failed.
func Failure(err error) *Outcome { return &Outcome{Kind: FailUpstream, Err: err} }

// refusalReason returns the reason of a refusal by its status code.
func refusalReason(err *apierrors.StatusError) meshv1.Refusal {
	switch err.ErrStatus.Code {
	case http.StatusGone:
		return meshv1.RefusedRelist
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType:
		return meshv1.RefusedMalformed
	case http.StatusTooManyRequests:
		return meshv1.RefusedBound
	case http.StatusNotAcceptable:
		return meshv1.RefusedNotAcceptable
	}
	return meshv1.RefusedLock
}
