package usage

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

var foos = schema.GroupResource{Group: "example.com", Resource: "foos"}

func at(ms int64) time.Time { return time.UnixMilli(ms) }

func TestRequestsAreCountedByResource(t *testing.T) {
	var l Log
	require.Nil(t, l.Report())
	for i, r := range []Request{
		{GroupResource: foos, Verb: "list", Namespace: "", Name: "", Code: 200},
		{GroupResource: foos, Verb: "watch", Namespace: "", Name: "", Code: 200},
		{GroupResource: foos, Verb: "get", Namespace: "a", Name: "x", Code: 404},
		{GroupResource: foos, Verb: "update", Namespace: "a", Name: "x", Code: 200},
		{GroupResource: foos, Verb: "update", Namespace: "a", Name: "y", Code: 200},
		{GroupResource: foos, Verb: "patch", Namespace: "b", Name: "x", Code: 409},
		{GroupResource: foos, Verb: "create", Namespace: "own", Name: "", Code: 201, Own: true},
		{GroupResource: foos, Verb: "update", Namespace: "own", Name: "state", Code: 200, Own: true},
		{GroupResource: leases, Verb: "update", Namespace: "locks", Name: "leader", Code: 200},
		{GroupResource: schema.GroupResource{Resource: "secrets"}, Verb: "list", Namespace: "", Name: "", Code: 403},
		{GroupResource: schema.GroupResource{Resource: "pods"}, Verb: "list", Namespace: "a", Name: "", Code: 200},
	} {
		l.Add(&r, at(int64(i+1)))
	}
	want := &meshv1.Usage{SinceMs: 1, LastMs: 11, Requests: 11, Forbidden: 1, Resources: []*meshv1.ResourceUsage{
		{Resource: "pods", Reads: 1},
		{
			Group: leases.Group, Resource: leases.Resource, Writes: 1, Namespaces: []*meshv1.NamespaceWrites{{Namespace: "locks", Writes: 1}},
			Objects: []*meshv1.ObjectWrites{{Namespace: "locks", Name: "leader", Writes: 1}},
		},
		{
			Group: foos.Group, Resource: foos.Resource, All: true, Reads: 3, Writes: 4, Conflicts: 1,
			Namespaces: []*meshv1.NamespaceWrites{{Namespace: "a", Writes: 2}, {Namespace: "own", Writes: 2}},
			Objects:    []*meshv1.ObjectWrites{{Namespace: "own", Name: "state", Writes: 1}},
		},
	}}
	require.True(t, proto.Equal(want, l.Report()), "%v", l.Report())
}

// Names that the apiserver does not serve, and names without end, take no memory.
func TestUsageIsBounded(t *testing.T) {
	var l Log
	for i := range 1000 {
		name := fmt.Sprintf("r-%04d", i)
		l.Add(&Request{GroupResource: schema.GroupResource{Resource: name}, Verb: "get", Code: http.StatusNotFound}, at(1))
		l.Add(&Request{GroupResource: foos, Verb: "update", Namespace: name, Name: name, Code: 200, Own: true}, at(1))
	}
	got := l.Report()
	require.Len(t, got.GetResources(), 1)
	of := got.GetResources()[0]
	require.Len(t, of.GetNamespaces(), meshv1.MaxUsageNamespaces)
	require.Len(t, of.GetObjects(), meshv1.MaxUsageObjects)
	require.EqualValues(t, 1000, of.GetWrites())
	require.EqualValues(t, 1000-meshv1.MaxUsageNamespaces, of.GetOtherWrites())
	for i := range 1000 {
		l.Add(&Request{GroupResource: schema.GroupResource{Resource: fmt.Sprintf("r-%04d", i)}, Verb: "get", Namespace: "a", Code: 200}, at(1))
	}
	require.Len(t, l.Report().GetResources(), meshv1.MaxUsageResources)
}

func TestLongNamesAreNotKept(t *testing.T) {
	long := strings.Repeat("x", maxName+1)
	var l Log
	l.Add(&Request{GroupResource: schema.GroupResource{Resource: long}, Verb: "get", Code: 200}, at(1))
	l.Add(&Request{GroupResource: schema.GroupResource{Group: long, Resource: "foos"}, Verb: "get", Code: 200}, at(1))
	l.Add(&Request{GroupResource: foos, Verb: "update", Namespace: long, Name: "x", Code: 200}, at(1))
	l.Add(&Request{GroupResource: foos, Verb: "update", Namespace: "own", Name: long, Code: 200, Own: true}, at(1))
	l.Event(schema.GroupResource{Resource: long}, []byte("a"), at(1))
	l.Event(foos, []byte(long), at(1))
	require.True(t, proto.Equal(&meshv1.Usage{SinceMs: 1, LastMs: 1, Requests: 4}, l.Report()), "%v", l.Report())
}

func TestUsageIsSafeForConcurrentUse(t *testing.T) {
	var l Log
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for i := range 100 {
				l.Add(&Request{GroupResource: foos, Verb: "update", Namespace: fmt.Sprint(i), Code: 200}, at(int64(i)))
				l.Report()
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 800, l.Report().GetRequests())
}

func BenchmarkAdd(b *testing.B) {
	var l Log
	r := Request{GroupResource: foos, Verb: "update", Namespace: "a", Name: "x", Code: 200, Own: true}
	b.ReportAllocs()
	for b.Loop() {
		l.Add(&r, at(1))
	}
}
