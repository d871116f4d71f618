package pipeline

import (
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Outcome says how a stage ends a request. A nil outcome passes it to the next stage.
type Outcome struct {
	Kind   outcomeKind
	Reason meshv1.Refusal
	Status *apierrors.StatusError // of a refusal
	Code   int                    // of an empty response
	Err    error                  // of an exchange with the apiserver
}

type outcomeKind int

const (
	Refuse          outcomeKind = iota // with a status, counted by reason
	Respond                            // with a status, in place of the apiserver's response
	RespondEmpty                       // with a status code alone
	FailUpstream                       // the apiserver did not answer: err
	ResetConnection                    // without a response
	StartOver                          // the policy changed: evaluate the request anew
)

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

// RefusalFor is refusal with a reason of its own.
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
	case http.StatusBadRequest:
		return meshv1.RefusedMalformed
	case http.StatusTooManyRequests:
		return meshv1.RefusedBound
	case http.StatusNotAcceptable:
		return meshv1.RefusedNotAcceptable
	}
	return meshv1.RefusedLock
}
