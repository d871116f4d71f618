package audit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// Request is one request as the apiserver recorded it.
type Request struct {
	ID     string
	User   string
	Pod    string // namespace/name that the token is bound to, if it is
	PodUID string
	From   []string // addresses: those in headers, and the connection's as the last
	Agent  string   // the client's program, as it names itself
	Verb   string
	URI    string
	// Group, Resource and Namespace of the object; empty if the request has none.
	Group, Resource, Namespace string
	Code                       int32 // 0 until the response began
	Received                   time.Time
	Ended                      time.Time // zero until the response is over
}

// String describes the request in one line.
func (r Request) String() string {
	return fmt.Sprintf("%s %s %s %d %s %s %s", r.Received.UTC().Format(time.RFC3339Nano), r.Verb, r.URI, r.Code, r.User, r.Pod, r.ID)
}

// End returns when the request ended. Without an end, because the apiserver was killed, it
// returns the request's beginning.
func (r Request) End() time.Time {
	if r.Ended.IsZero() {
		return r.Received
	}
	return r.Ended
}

// Fills reports whether the request is for all existing objects: an informer sends it at its
// start, and again only if its resourceVersion is too old.
func (r Request) Fills() bool {
	switch r.Verb {
	case "list":
		return true
	case "watch":
		_, query, _ := strings.Cut(r.URI, "?")
		q, err := url.ParseQuery(query)
		return err == nil && q.Get("sendInitialEvents") == "true"
	}
	return false
}

// Writes reports whether the request is a write.
func (r Request) Writes() bool {
	switch r.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return true
	}
	return false
}

// DryRun reports whether the request takes no effect.
func (r Request) DryRun() bool {
	_, query, _ := strings.Cut(r.URI, "?")
	q, err := url.ParseQuery(query)
	return err == nil && slices.Equal(q["dryRun"], []string{"All"})
}

// Callers selects the requests of any of the users, and those with a token bound to any of
// the pods.
type Callers struct {
	Users []string // as authenticated; see ServiceAccount
	Pods  []string // namespace/name
	Since time.Time
}

// ServiceAccount returns the user name of a service account.
func ServiceAccount(namespace, name string) string {
	return serviceAccountPrefix + namespace + ":" + name
}

const (
	serviceAccountPrefix = "system:serviceaccount:"
	podClaim             = "authentication.kubernetes.io/pod-name"
	podUIDClaim          = "authentication.kubernetes.io/pod-uid"
)

// Requests reads an audit log, one audit.k8s.io/v1 Event per line, and returns the
// callers' requests in the order of the log. A request has an event for each of
// its stages; it is returned once, with the content of its last event.
//
// A last line without an end is still being written, and is skipped.
func Requests(log io.Reader, of Callers) ([]Request, error) {
	r := Record{Of: of}
	_, err := r.Read(log)
	return r.requests, err
}

// Record accumulates the callers' requests from the parts of an audit log. Its zero value,
// with the callers, is empty.
type Record struct {
	Of Callers

	requests []Request
	index    map[string]int // by id
}

// Requests returns the requests so far, as the function of this name does.
func (r *Record) Requests() []Request { return slices.Clone(r.requests) }

// Read adds the next part of the log. It returns the length, in bytes, of the complete lines
// that it has read: the part after this one begins there.
func (r *Record) Read(part io.Reader) (length int64, err error) {
	err = eachLine(part, func(n int, line []byte) error {
		if r.Of.mayHave(line) {
			var e auditv1.Event
			if err := json.Unmarshal(line, &e); err != nil {
				return fmt.Errorf("audit log, line %d: %w", n, err)
			}
			r.add(request(&e))
		}
		length += int64(len(line)) + 1
		return nil
	})
	return length, err
}

func (r *Record) add(q Request) {
	if !r.Of.have(q) {
		return
	}
	if i, ok := r.index[q.ID]; ok {
		r.requests[i] = q
		return
	}
	if r.index == nil {
		r.index = map[string]int{}
	}
	r.index[q.ID] = len(r.requests)
	r.requests = append(r.requests, q)
}

func request(e *auditv1.Event) Request {
	r := Request{
		ID:       string(e.AuditID),
		User:     e.User.Username,
		From:     e.SourceIPs,
		Agent:    e.UserAgent,
		Verb:     e.Verb,
		URI:      e.RequestURI,
		Received: e.RequestReceivedTimestamp.Time,
	}
	if e.ResponseStatus != nil {
		r.Code = e.ResponseStatus.Code
	}
	if e.Stage == auditv1.StageResponseComplete || e.Stage == auditv1.StagePanic {
		r.Ended = e.StageTimestamp.Time
	}
	if pod := e.User.Extra[podClaim]; len(pod) == 1 {
		r.Pod = namespaceOf(r.User) + "/" + pod[0]
	}
	if uid := e.User.Extra[podUIDClaim]; len(uid) == 1 {
		r.PodUID = uid[0]
	}
	if ref := e.ObjectRef; ref != nil {
		r.Group, r.Resource, r.Namespace = ref.APIGroup, ref.Resource, ref.Namespace
	}
	return r
}

// namespaceOf returns the namespace of a service account's user name.
func namespaceOf(user string) string {
	rest, ok := strings.CutPrefix(user, serviceAccountPrefix)
	if !ok {
		return ""
	}
	namespace, _, _ := strings.Cut(rest, ":")
	return namespace
}

func (c Callers) have(r Request) bool {
	return !r.Received.Before(c.Since) &&
		(slices.Contains(c.Users, r.User) || r.Pod != "" && slices.Contains(c.Pods, r.Pod))
}

// mayHave reports whether a line may be of one of the callers. Most lines of a log are not,
// and need no decoding.
func (c Callers) mayHave(line []byte) bool {
	contains := func(text string) bool { return bytes.Contains(line, []byte(text)) }
	return slices.ContainsFunc(c.Users, contains) ||
		len(c.Pods) > 0 && contains(podClaim) && slices.ContainsFunc(c.Pods, func(pod string) bool {
			namespace, _, _ := strings.Cut(pod, "/")
			return contains(ServiceAccount(namespace, ""))
		})
}
