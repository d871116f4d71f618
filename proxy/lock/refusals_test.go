package lock

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

// answer is a response to a request for the lock, some time after the first one.
type answer struct {
	verb  string
	code  int
	after time.Duration
}

func lockNamed(t *testing.T, name, upstream string) *Lock {
	t.Helper()
	l, err := New(&meshv1.Lock{Namespace: "kube-system", Name: name, UpstreamName: upstream})
	require.NoError(t, err)
	return l
}

func TestLastingRefusalsOfLocksAreKept(t *testing.T) {
	const retry = 2 * time.Second
	for name, c := range map[string]struct {
		answers []answer
		refused string // verb and code, empty: none
	}{
		"a forbidden read":                  {[]answer{{"get", 403, 0}}, "get 403"},
		"a forbidden update":                {[]answer{{"get", 200, 0}, {"update", 403, 0}, {"get", 200, retry}}, "update 403"},
		"a forbidden creation":              {[]answer{{"get", 404, 0}, {"create", 403, 0}, {"get", 404, retry}}, "create 403"},
		"a forbidden watch":                 {[]answer{{"watch", 403, 0}}, "watch 403"},
		"no namespace":                      {[]answer{{"get", 404, 0}, {"create", 404, 0}}, "create 404"},
		"no lock yet":                       {[]answer{{"get", 404, 0}}, ""},
		"no lock, created":                  {[]answer{{"get", 404, 0}, {"create", 201, 0}}, ""},
		"no lock, created by another":       {[]answer{{"get", 404, 0}, {"create", 409, 0}, {"get", 200, time.Minute}}, ""},
		"a lock that nobody creates":        {[]answer{{"get", 404, 0}, {"get", 404, retry}, {"get", 404, lastingAfter}}, "get 404"},
		"one that was created later":        {[]answer{{"get", 404, 0}, {"get", 404, lastingAfter}, {"get", 200, lastingAfter}}, ""},
		"one webhook timeout":               {[]answer{{"update", 500, 0}}, ""},
		"webhook timeouts for a while":      {[]answer{{"update", 500, 0}, {"get", 200, 5 * time.Second}, {"update", 500, lastingAfter}}, "update 500"},
		"webhook timeouts with a success":   {[]answer{{"update", 500, 0}, {"update", 200, 5 * time.Second}, {"update", 500, lastingAfter}}, ""},
		"an invalid object":                 {[]answer{{"update", 422, 0}, {"update", 422, lastingAfter}}, "update 422"},
		"an apiserver that is away":         {[]answer{{"get", 503, 0}, {"get", 503, lastingAfter}}, ""},
		"conflicts":                         {[]answer{{"update", 409, 0}, {"update", 409, lastingAfter}}, ""},
		"forbidden, then updated":           {[]answer{{"update", 403, 0}, {"update", 200, retry}}, ""},
		"forbidden, then patched":           {[]answer{{"update", 403, 0}, {"patch", 200, retry}}, ""},
		"forbidden, then a conflict":        {[]answer{{"update", 403, 0}, {"update", 409, retry}}, ""},
		"forbidden creation, then there":    {[]answer{{"create", 403, 0}, {"get", 200, retry}}, ""},
		"forbidden creation, then listed":   {[]answer{{"create", 403, 0}, {"list", 200, retry}}, "create 403"},
		"forbidden, and not tried for long": {[]answer{{"update", 403, 0}, {"watch", 200, refusedFor}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := lockNamed(t, "op", "op---s1")
			var r Refusals
			now := time.Unix(1e9, 0)
			for _, a := range c.answers {
				now = time.Unix(1e9, 0).Add(a.after)
				r.Note(Request{l, "leases", a.verb}, Set{l}, a.code, typeJSON, nil, now)
			}
			out := r.Of(Set{l}, now)
			if c.refused == "" {
				require.Empty(t, out)
				return
			}
			require.Len(t, out, 1)
			require.Equal(t, c.refused, fmt.Sprintf("%s %d", out[0].Verb, out[0].Code))
			require.Equal(t, "kube-system/op leases", out[0].Namespace+"/"+out[0].Name+" "+out[0].Resource)
			require.Empty(t, r.Of(Set{l}, now.Add(refusedFor)), "it has not been tried since")
		})
	}
}

func TestRefusalsOfFormerLocksAreForgotten(t *testing.T) {
	before, after := lockNamed(t, "op", "op---s1"), lockNamed(t, "op", "op---s2")
	other := lockNamed(t, "other", "other---s1")
	now := time.Unix(1e9, 0)
	var r Refusals
	r.Note(Request{before, "leases", "update"}, Set{before, other}, 403, typeJSON, nil, now)
	require.Len(t, r.Of(Set{before, other}, now), 1)
	require.Empty(t, r.Of(Set{after, other}, now), "it has another name upstream")
	r.Note(Request{other, "leases", "get"}, Set{after, other}, 200, typeJSON, nil, now)
	require.Empty(t, r.known)
}

func TestRefusalsInOneReportAreBounded(t *testing.T) {
	var r Refusals
	var locks Set
	now := time.Unix(1e9, 0)
	for i := range meshv1.MaxLocks {
		locks = append(locks, lockNamed(t, fmt.Sprintf("op-%02d", i), fmt.Sprintf("op-%02d---s", i)))
	}
	for _, l := range locks {
		for _, resource := range []string{"leases", "configmaps"} {
			r.Note(Request{l, resource, "update"}, locks, 403, typeJSON, nil, now)
		}
	}
	out := r.Of(locks, now)
	require.Len(t, out, meshv1.MaxLockRefusals)
	require.Equal(t, "op-00 configmaps", out[0].Name+" "+out[0].Resource)
}

func TestRefusalHasTheMessageOfTheAPIServer(t *testing.T) {
	const denied = `User "system:serviceaccount:op:sa" cannot update resource "leases" in API group "coordination.k8s.io" in the namespace "kube-system"`
	inJSON := func(s metav1.Status) []byte {
		s.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
		out, err := json.Marshal(s)
		require.NoError(t, err)
		return out
	}
	inProtobuf := func(s metav1.Status) []byte {
		raw, err := s.Marshal()
		require.NoError(t, err)
		envelope := runtime.Unknown{TypeMeta: runtime.TypeMeta{Kind: "Status", APIVersion: "v1"}, Raw: raw}
		out, err := envelope.Marshal()
		require.NoError(t, err)
		return append([]byte(fields.Magic), out...)
	}
	denial := metav1.Status{Reason: metav1.StatusReasonForbidden, Message: `leases.coordination.k8s.io "op---s1" is forbidden: ` + denied}
	for name, c := range map[string]struct {
		code        int
		contentType string
		body        []byte
		want        string
	}{
		"JSON":               {403, typeJSON, inJSON(denial), denied},
		"protobuf":           {403, typeProtobuf, inProtobuf(denial), denied},
		"a webhook":          {403, typeJSON, inJSON(metav1.Status{Message: "admission webhook \"x\" denied\nthe request"}), `admission webhook "x" denied the request`},
		"the pod's own text": {422, typeJSON, inJSON(metav1.Status{Reason: metav1.StatusReasonInvalid, Message: `Invalid value: "of the pod"`}), "Invalid"},
		"text":               {403, "text/plain", []byte(`Forbidden: "/apis?of=the-pod"`), ""},
		"another object":     {403, typeJSON, []byte(`{"kind":"Lease","message":"of the pod"}`), ""},
		"no JSON":            {403, typeJSON, []byte(`{`), ""},
		"no protobuf":        {403, typeProtobuf, []byte("k8s"), ""},
		"no media type":      {403, ";", inJSON(denial), ""},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, refusalMessage(c.code, c.contentType, c.body)) })
	}
	long := refusalMessage(403, typeJSON, inJSON(metav1.Status{Message: strings.Repeat("é", meshv1.MaxRefusalMessage) + "x"}))
	require.Equal(t, strings.Repeat("é", meshv1.MaxRefusalMessage/2), long)
	long = refusalMessage(403, typeJSON, inJSON(metav1.Status{Message: "x" + strings.Repeat("é", meshv1.MaxRefusalMessage)}))
	require.Equal(t, "x"+strings.Repeat("é", meshv1.MaxRefusalMessage/2-1), long)
}

func TestRepeatedRefusalKeepsItsMessage(t *testing.T) {
	l := lockNamed(t, "op", "op---s1")
	var r Refusals
	now := time.Unix(1e9, 0)
	for _, message := range []string{"at 12:00:01", "at 12:00:02"} {
		r.Note(Request{l, "leases", "update"}, Set{l}, 403, typeJSON, fmt.Appendf(nil, `{"kind":"Status","message":%q}`, message), now)
	}
	require.Equal(t, "at 12:00:01", r.Of(Set{l}, now)[0].Message, "a report at each retry would add nothing")
}

// A pod renews its lock every two seconds, and reads others.
func TestSuccessesOfLocksAllocateNothing(t *testing.T) {
	l := lockNamed(t, "op", "op---s1")
	var r Refusals
	now := time.Unix(1e9, 0)
	require.Zero(t, testing.AllocsPerRun(100, func() { r.Note(Request{l, "leases", "update"}, Set{l}, 200, typeJSON, nil, now) }))
}
