package lock

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

const (
	// lastingAfter is how long refusals that may be temporary must repeat before they are
	// reported. A client that finds no lock creates it within one retry period.
	lastingAfter = 10 * time.Second
	// refusedFor is how long after its last repetition a refusal is reported. It is longer
	// than the kubelet waits before it restarts a container that keeps failing.
	refusedFor = 6 * time.Minute
)

// Status codes of responses.
const (
	badRequest    = 400
	unauthorized  = 401
	forbidden     = 403
	notFound      = 404
	conflict      = 409
	internalError = 500
)

// Refusal is an error that the apiserver answers to a pod's requests for one of its locks.
type Refusal struct {
	// Namespace and Name of the lock, by the operator's own name; Resource is leases, configmaps
	// or endpoints.
	Namespace, Name, Resource string
	// Verb of the request, and Code of the response.
	Verb string
	Code int
	// Message is the apiserver's, at most meshv1.MaxRefusalMessage bytes. It may be empty.
	Message string
}

// rank orders refusals of one lock by how much they explain: a GET that finds no lock precedes
// a create that is forbidden.
func (r Refusal) rank() int {
	switch {
	case r.Code == forbidden:
		return 2
	case isWrite(r.Verb):
		return 1
	}
	return 0
}

// lasting reports whether a retry cannot succeed before somebody changes the cluster.
func (r Refusal) lasting() bool {
	return r.Code == forbidden || r.Code == notFound && r.Verb == "create"
}

func isWrite(verb string) bool {
	switch verb {
	case "get", "list", "watch":
		return false
	}
	return true
}

// Request is a request for a lock.
type Request struct {
	Lock *Lock
	// Resource of the object: leases, configmaps or endpoints.
	Resource, Verb string
}

// Refusals are the refusals of a pod's requests for its locks. The zero value is ready to use.
// It is safe for concurrent use. It has at most one refusal for each object of a lock.
type Refusals struct {
	mu    sync.Mutex
	known map[lockObject]*refused
}

// lockObject is one of the objects that a lock may consist of.
type lockObject struct {
	types.NamespacedName
	resource string
}

type refused struct {
	Refusal
	lock        *Lock
	first, last time.Time // of all refusals since the last success
}

// Note notes the response to a request for a lock. named are the locks of the policy; the
// refusals of others are forgotten.
func (r *Refusals) Note(q Request, named Set, code int, contentType string, body []byte, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, known := range r.known {
		if !known.lock.Equal(named.Named(key.Namespace, key.Name)) || now.Sub(known.last) >= refusedFor {
			delete(r.known, key)
		}
	}
	key := lockObject{q.Lock.key(), q.Resource}
	known := r.known[key]
	switch {
	case code == conflict || code/100 == 2:
		if known != nil && known.disproved(q.Verb, code) {
			delete(r.known, key)
		}
	case refuses(q.Verb, code):
		r.add(key, q, code, contentType, body, now)
	}
}

// refuses reports whether a response is worth noting as a refusal.
func refuses(verb string, code int) bool {
	switch code {
	case unauthorized, forbidden, notFound:
		return true
	}
	return isWrite(verb) && code >= badRequest
}

// disproved reports whether a response shows that the refusal does not last. The apiserver
// checks permissions before conflicts. A lock that can be read needs no creation.
func (r *refused) disproved(verb string, code int) bool {
	switch {
	case verb == r.Verb:
		return true
	case code == conflict:
		return false
	case verb == "get":
		return !isWrite(r.Verb) || r.Verb == "create" || r.Code == notFound
	}
	return isWrite(verb)
}

func (r *Refusals) add(key lockObject, q Request, code int, contentType string, body []byte, now time.Time) {
	next := Refusal{Namespace: q.Lock.Namespace(), Name: q.Lock.Name(), Resource: strings.Clone(q.Resource), Verb: strings.Clone(q.Verb), Code: code}
	known := r.known[key]
	switch {
	case known == nil:
		known = &refused{lock: q.Lock, first: now}
	case next.Verb == known.Verb && code == known.Code:
		known.last = now // the first message stays: others may differ in details alone
		return
	case next.rank() < known.rank():
		return
	}
	next.Message = refusalMessage(code, contentType, body)
	known.Refusal, known.last = next, now
	if r.known == nil {
		r.known = map[lockObject]*refused{}
	}
	key.resource = next.Resource
	r.known[key] = known
}

// Of returns the refusals that last, sorted by lock: at most meshv1.MaxLockRefusals of those of
// the named locks.
func (r *Refusals) Of(named Set, now time.Time) (out []Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, known := range r.known {
		repeats := known.lasting() || known.last.Sub(known.first) >= lastingAfter
		if repeats && now.Sub(known.last) < refusedFor && known.lock.Equal(named.Named(key.Namespace, key.Name)) {
			out = append(out, known.Refusal)
		}
	}
	slices.SortFunc(out, func(a, b Refusal) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Resource, b.Resource))
	})
	return out[:min(len(out), meshv1.MaxLockRefusals)]
}

// forbiddenPrefix ends what the apiserver says about the object before why it is forbidden.
const forbiddenPrefix = " is forbidden: "

// refusalMessage returns why the apiserver refuses a request. Messages of other codes, and
// answers without a Status, may quote the request, which is the pod's own text; of those it
// returns the Status's reason alone.
func refusalMessage(code int, contentType string, body []byte) string {
	s := readStatus(contentType, body)
	text := string(s.Reason)
	switch {
	case code == unauthorized, code == forbidden, code == notFound, code >= internalError:
		text = s.Message
	}
	if i := strings.LastIndex(text, forbiddenPrefix); i >= 0 {
		text = text[i+len(forbiddenPrefix):]
	}
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			return ' '
		}
		return r
	}, text)
	if len(text) <= meshv1.MaxRefusalMessage {
		return text
	}
	return strings.ToValidUTF8(text[:meshv1.MaxRefusalMessage], "")
}

// readStatus reads a Status. It returns the zero Status if body is none.
func readStatus(contentType string, body []byte) (s metav1.Status) {
	media, err := mediaType(contentType)
	if err != nil {
		return s
	}
	switch media {
	case typeJSON:
		if json.Unmarshal(body, &s) != nil || s.Kind != "Status" {
			return metav1.Status{}
		}
	case typeProtobuf:
		raw, ok := bytes.CutPrefix(body, []byte(fields.Magic))
		var envelope runtime.Unknown
		if !ok || envelope.Unmarshal(raw) != nil || envelope.Kind != "Status" || s.Unmarshal(envelope.Raw) != nil {
			return metav1.Status{}
		}
	}
	return s
}
