package lock

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
)

// MaxObject bounds a lock's body, in bytes, as the apiserver bounds requests.
const MaxObject = 3 << 20

const (
	fieldSelector = "fieldSelector"
	metadataName  = "metadata.name"
)

// ErrUnsupported means that the media type of a body cannot be edited.
var ErrUnsupported = errors.New("unsupported media type")

// Lock swaps the name and the upstream name of one operator lock. It is immutable.
type Lock struct {
	namespace, name, upstream string
	up, down                  names
}

// names is one direction of the swap.
type names struct{ from, to string }

func (n names) swap(s string) (string, bool) {
	if s == n.from {
		return n.to, true
	}
	return s, false
}

// New returns a Lock that replaces the name by the upstream name in requests, and the
// upstream name by the name in answers.
func New(l *meshv1.Lock) (*Lock, error) {
	if l.GetName() == l.GetUpstreamName() {
		return nil, fmt.Errorf("lock: name and upstream name are both %q", l.GetName())
	}
	return newLock(l, l.GetUpstreamName())
}

// NewUnrenamed returns a Lock that keeps its name upstream.
func NewUnrenamed(l *meshv1.Lock) (*Lock, error) { return newLock(l, l.GetName()) }

func newLock(l *meshv1.Lock, upstream string) (*Lock, error) {
	for _, f := range []struct{ field, value string }{
		{"namespace", l.GetNamespace()}, {"name", l.GetName()}, {"upstream name", l.GetUpstreamName()},
	} {
		if errs := validation.IsDNS1123Subdomain(f.value); len(errs) > 0 {
			return nil, fmt.Errorf("lock: %s %q: %s", f.field, f.value, errs[0])
		}
	}
	return &Lock{
		namespace: l.GetNamespace(),
		name:      l.GetName(),
		upstream:  upstream,
		up:        names{from: l.GetName(), to: upstream},
		down:      names{from: upstream, to: l.GetName()},
	}, nil
}

// Kind reports whether a resource can be an operator lock.
func Kind(group, resource string) bool {
	switch resource {
	case "leases":
		return group == "coordination.k8s.io"
	case "configmaps", "endpoints":
		return group == ""
	}
	return false
}

// Namespace returns the namespace of the lock.
func (l *Lock) Namespace() string { return l.namespace }

// Name returns the name that clients use for the lock.
func (l *Lock) Name() string { return l.name }

// Named reports whether the object with a namespace and name is the lock.
func (l *Lock) Named(namespace, name string) bool {
	return namespace == l.namespace && name == l.name
}

// Equal reports whether both swap the same names. Either may be nil.
func (l *Lock) Equal(o *Lock) bool {
	if l == nil || o == nil {
		return l == o
	}
	return l.up == o.up && l.namespace == o.namespace
}

// Path replaces a segment of an escaped path by the upstream name. Segments are counted
// from the end: 0 is the last one, and a trailing slash does not count.
func (l *Lock) Path(escaped string, segment int) string {
	trimmed := strings.TrimRight(escaped, "/")
	parts := strings.Split(trimmed, "/")
	if i := len(parts) - 1 - segment; i >= 0 {
		parts[i] = url.PathEscape(l.upstream)
	}
	return strings.Join(parts, "/") + escaped[len(trimmed):]
}

// Query replaces the name in the field selector of a raw query by the upstream name.
// byName reports whether the selector selects exactly the lock. If not, Query returns raw
// unchanged.
func (l *Lock) Query(raw string) (out string, byName bool, err error) {
	text, ok, err := query.Get(raw, fieldSelector)
	if err != nil || !ok {
		return raw, false, err
	}
	sel, err := fields.ParseSelector(text)
	if err != nil {
		return raw, false, fmt.Errorf("unable to parse fieldSelector: %w", err)
	}
	if name, exact := sel.RequiresExactMatch(metadataName); !exact || name != l.name {
		return raw, false, nil
	}
	sel, err = sel.Transform(func(field, value string) (string, string, error) {
		if field == metadataName {
			value, _ = l.up.swap(value)
		}
		return field, value, nil
	})
	if err != nil {
		return raw, false, err
	}
	out, err = query.Set(raw, fieldSelector, sel.String())
	return out, true, err
}
