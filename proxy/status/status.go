// Package status answers requests the way the apiserver refuses them: with a
// metav1.Status in the type the client negotiated.
package status

import (
	"fmt"
	"net/http"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// New returns a refusal. If retry is above 0, it is sent as Retry-After, in seconds:
// clients of Kubernetes then retry on 429 and 5xx.
func New(code int, reason metav1.StatusReason, retry int, format string, args ...any) *apierrors.StatusError {
	s := metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure,
		Code:     int32(code),
		Reason:   reason,
		Message:  "ctrlmesh: " + fmt.Sprintf(format, args...),
	}
	if retry > 0 {
		s.Details = &metav1.StatusDetails{RetryAfterSeconds: int32(retry)}
	}
	return &apierrors.StatusError{ErrStatus: s}
}

// BadRequest returns 400: the request is ambiguous or malformed.
func BadRequest(format string, args ...any) *apierrors.StatusError {
	return New(http.StatusBadRequest, metav1.StatusReasonBadRequest, 0, format, args...)
}

// Unavailable returns 503 with Retry-After in seconds.
func Unavailable(retry int, format string, args ...any) *apierrors.StatusError {
	return New(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable, retry, format, args...)
}

// TooLarge returns 413: the body has more than limit bytes.
func TooLarge(limit int) *apierrors.StatusError {
	return New(http.StatusRequestEntityTooLarge, metav1.StatusReasonRequestEntityTooLarge, 0, "the body is larger than %d bytes", limit)
}

// UnsupportedMediaType returns 415: the proxy must read the body, and cannot.
func UnsupportedMediaType(format string, args ...any) *apierrors.StatusError {
	return New(http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType, 0, format, args...)
}

// NotAcceptable returns 406: the proxy must read the response, and could not.
func NotAcceptable(format string, args ...any) *apierrors.StatusError {
	return New(http.StatusNotAcceptable, metav1.StatusReasonNotAcceptable, 0, format, args...)
}

// maxNegotiated bounds the header and the query that are read to negotiate a type, in
// bytes: parsing can take fifty times as much memory. Clients of Kubernetes send less than
// a fifth of that.
const maxNegotiated = 1 << 10

// Write answers r with err, and returns the number of body bytes. It negotiates the type.
// A client that accepts no known type, or whose header is too long, gets JSON.
func Write(w http.ResponseWriter, r *http.Request, err *apierrors.StatusError) int {
	fields, body := Encode(r.Header.Get("Accept"), r.URL.RawQuery, err)
	fields.AddTo(w.Header())
	w.WriteHeader(int(err.ErrStatus.Code))
	if r.Method == http.MethodHead {
		return 0
	}
	n, _ := w.Write(body)
	return n
}

// Encode returns the header and the body of the answer err to a request with an Accept and a raw query. Both are read
// to negotiate the type: the query because of pretty=. The User-Agent, by which the apiserver indents, is not.
func Encode(accept, query string, err *apierrors.StatusError) (fields header.Fields, body []byte) {
	s := err.ErrStatus
	mediaType, body := encode(accept, query, &s)
	fields = header.Fields{
		{Name: "Content-Type", Value: mediaType},
		{Name: "Content-Length", Value: strconv.Itoa(len(body))},
		{Name: "Cache-Control", Value: "no-cache, private"},
	}
	if s.Details != nil && s.Details.RetryAfterSeconds > 0 {
		fields = append(fields, header.Field{Name: "Retry-After", Value: strconv.Itoa(int(s.Details.RetryAfterSeconds))})
	}
	return fields, body
}

func encode(accept, query string, s *metav1.Status) (mediaType string, body []byte) {
	if len(accept) > maxNegotiated || len(query) > maxNegotiated {
		accept, query = "", ""
	}
	mediaType, serializer := negotiate(accept, query)
	body, err := runtime.Encode(serializer, s)
	if err != nil {
		panic(fmt.Sprintf("status: %v", err)) // a Status always encodes
	}
	return mediaType, body
}
