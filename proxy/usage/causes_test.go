package usage

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var secrets = schema.GroupResource{Resource: "secrets"}

// story is what a log sees, at seconds.
type story struct{ Log }

func (s *story) event(second float64, of schema.GroupResource, namespace string) {
	s.Event(of, []byte(namespace), time.Unix(0, 0).Add(time.Duration(second*float64(time.Second))))
}

func (s *story) write(second float64, of schema.GroupResource, namespace string, edit ...func(*Request)) {
	sent := time.Unix(0, 0).Add(time.Duration(second * float64(time.Second)))
	r := &Request{GroupResource: of, Verb: "update", Namespace: namespace, Name: "x", Code: 200, Sent: sent}
	for _, e := range edit {
		e(r)
	}
	s.Add(r, sent.Add(100*time.Millisecond))
}

// crossed returns what was counted, as "resource in namespace by resource: writes".
func (s *story) crossed() (out []string) {
	for _, r := range s.Report().GetResources() {
		for _, c := range r.GetCross() {
			out = append(out, fmt.Sprintf("%s in %s by %s: %d", r.GetResource(), c.GetNamespace(), c.GetCauseResource(), c.GetWrites()))
		}
	}
	return out
}

func TestWritesAfterChangesInOtherNamespaces(t *testing.T) {
	for name, c := range map[string]struct {
		seen func(s *story)
		want []string
	}{
		"in its own namespace": {seen: func(s *story) {
			s.event(1000, foos, "a")
			s.write(1001, secrets, "a")
		}},
		"in another namespace": {seen: func(s *story) {
			for at := 1000.0; at < 1040; at += 10 {
				s.event(at, foos, "a")
				s.write(at+1, secrets, "infra")
			}
		}, want: []string{"secrets in infra by foos: 4"}},
		"whose events it watches, which come before the response or after it": {seen: func(s *story) {
			for at := 1000.0; at < 1040; at += 10 {
				s.event(at, foos, "a")
				s.event(at+1.05, secrets, "infra")
				s.write(at+1, secrets, "infra")
				s.event(at+1.2, secrets, "infra")
			}
		}, want: []string{"secrets in infra by foos: 4"}},
		"where others write, too": {seen: func(s *story) {
			s.event(980, secrets, "infra")
			s.event(1000, foos, "a")
			s.write(1001, secrets, "infra")
		}},
		"long after all changes": {seen: func(s *story) {
			s.event(1000, foos, "a")
			s.write(1006, secrets, "infra")
		}},
		"after a change of what every shard sees": {seen: func(s *story) {
			s.event(1000, schema.GroupResource{Resource: "nodes"}, "")
			s.write(1001, secrets, "infra")
		}},
		"of a status": {seen: func(s *story) {
			s.event(1000, foos, "a")
			s.write(1001, foos, "infra", func(r *Request) { r.Subresource = "status" })
		}},
		"in the operator's own namespace, and in none": {seen: func(s *story) {
			s.event(1000, foos, "a")
			s.write(1001, secrets, "team", func(r *Request) { r.Own = true })
			s.write(1001, secrets, "")
		}},
		"while more changes than there is room for": {seen: func(s *story) {
			for i := range maxChanged + 1 {
				s.event(1000, foos, fmt.Sprint(i))
			}
			s.write(1001, secrets, "infra")
			require.Len(t, s.causes.changed, maxChanged)
			s.event(1070, foos, "a")
			require.Len(t, s.causes.changed, 1)
			s.write(1071, secrets, "infra")
		}, want: []string{"secrets in infra by foos: 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &story{}
			c.seen(s)
			require.Equal(t, c.want, s.crossed())
		})
	}
}

func BenchmarkEvent(b *testing.B) {
	var l Log
	b.ReportAllocs()
	for b.Loop() {
		l.Event(foos, []byte("a"), at(1))
	}
}
