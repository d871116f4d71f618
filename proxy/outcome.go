package proxy

import (
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// outcome says how a stage ends a request. A nil outcome passes it to the next stage.
type outcome struct {
	kind   outcomeKind
	reason string                 // of a refusal, in metrics
	status *apierrors.StatusError // of a refusal
	code   int                    // of an empty response
}

type outcomeKind int

const (
	refuseRequest   outcomeKind = iota // with a status, counted by reason
	respondEmpty                       // with a status code alone
	resetConnection                    // without a response
	startOver                          // the policy changed: evaluate the request anew
)

var (
	restart = &outcome{kind: startOver}
	reset   = &outcome{kind: resetConnection}
)

// refusal returns the outcome of a refusal, nil if there is none.
func refusal(status *apierrors.StatusError) *outcome {
	if status == nil {
		return nil
	}
	return refusalBy(refusalReason(status), status)
}

// refusalBy is refusal with a reason of its own.
func refusalBy(reason string, status *apierrors.StatusError) *outcome {
	return &outcome{reason: reason, status: status}
}

// refusalReason returns the reason of a refusal by its status code.
func refusalReason(err *apierrors.StatusError) string {
	switch err.ErrStatus.Code {
	case http.StatusGone:
		return "relist"
	case http.StatusBadRequest:
		return "malformed"
	case http.StatusTooManyRequests:
		return "bound"
	case http.StatusNotAcceptable:
		return "not_acceptable"
	}
	return "lock"
}

// conclude carries out an outcome, except for a restart.
func (x *exchange) conclude(o *outcome) {
	switch o.kind {
	case refuseRequest:
		x.refuse(o.reason, o.status)
	case respondEmpty:
		x.final(x.w.Header())
		x.wrote, x.code = true, o.code
		x.w.WriteHeader(o.code)
	case resetConnection:
		x.reset()
	}
}
