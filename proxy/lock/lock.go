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

// ErrUnsupported is a body in a type that cannot be edited.
var ErrUnsupported = errors.New("unsupported media type")

// Lock exchanges the names of one lock. It is immutable.
type Lock struct {
	namespace, name, upstream string
	up, down                  names
}

// names is one direction of the exchange.
type names struct{ from, to string }

func (n names) swap(s string) (string, bool) {
	if s == n.from {
		return n.to, true
	}
	return s, false
}

// New returns the Lock that has its upstream name on the way up.
func New(l *meshv1.Lock) (*Lock, error) {
	if l.GetName() == l.GetUpstreamName() {
		return nil, fmt.Errorf("lock: name and upstream name are both %q", l.GetName())
	}
	return newLock(l, l.GetUpstreamName())
}

// NewUnrenamed returns a Lock that has its own name upstream, too.
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

// Kind reports whether locks are made of this resource.
func Kind(group, resource string) bool {
	switch resource {
	case "leases":
		return group == "coordination.k8s.io"
	case "configmaps", "endpoints":
		return group == ""
	}
	return false
}

// Namespace is where the lock lives.
func (l *Lock) Namespace() string { return l.namespace }

// Name is what clients call the lock.
func (l *Lock) Name() string { return l.name }

// Named reports whether an object of this namespace and name is the lock.
func (l *Lock) Named(namespace, name string) bool {
	return namespace == l.namespace && name == l.name
}

// Equal reports whether both exchange the same names. Either may be nil.
func (l *Lock) Equal(o *Lock) bool {
	if l == nil || o == nil {
		return l == o
	}
	return l.up == o.up && l.namespace == o.namespace
}

// Path replaces segment, counted from the end of an escaped path (0 is the
// last; a trailing slash does not count), by the upstream name.
func (l *Lock) Path(escaped string, segment int) string {
	trimmed := strings.TrimRight(escaped, "/")
	parts := strings.Split(trimmed, "/")
	if i := len(parts) - 1 - segment; i >= 0 {
		parts[i] = url.PathEscape(l.upstream)
	}
	return strings.Join(parts, "/") + escaped[len(trimmed):]
}

// Query exchanges the name in the field selector of raw. byName reports whether
// the selector asked for exactly the lock; else raw comes back as it was.
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
