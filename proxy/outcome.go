package proxy

import (
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// outcome says how a stage ends a request. A nil outcome passes it to the next stage.
type outcome struct {
	kind   outcomeKind
	reason meshv1.Refusal
	status *apierrors.StatusError // of a refusal
	code   int                    // of an empty response
	err    error                  // of an exchange with the apiserver
}

type outcomeKind int

const (
	refuseRequest   outcomeKind = iota // with a status, counted by reason
	respond                            // with a status, in place of the apiserver's response
	respondEmpty                       // with a status code alone
	failUpstream                       // the apiserver did not answer: err
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
func refusalBy(reason meshv1.Refusal, status *apierrors.StatusError) *outcome {
	return &outcome{reason: reason, status: status}
}

// failure returns the outcome of an exchange with the apiserver that failed.
func failure(err error) *outcome { return &outcome{kind: failUpstream, err: err} }

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
