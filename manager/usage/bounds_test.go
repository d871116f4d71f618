package usage

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// An agent may be compromised, or a later version.
func TestUsageIsBounded(t *testing.T) {
	require.Nil(t, Bounded(nil))
	usual := &meshv1.Usage{SinceMs: 1, LastMs: 2, Requests: 3, Forbidden: 1, Resources: []*meshv1.ResourceUsage{{
		Group: "example.com", Resource: "foos", All: true, Reads: 4, Writes: 5, Conflicts: 6, OtherWrites: 7,
		Namespaces: []*meshv1.NamespaceWrites{{Writes: 1}, {Namespace: "a", Writes: 2}},
		Objects:    []*meshv1.ObjectWrites{{Namespace: "a", Name: "system:x", Writes: 1}},
		Bytes:      8, Events: 9, Indivisible: true,
		Cross: []*meshv1.CrossWrites{{Namespace: "b", CauseGroup: "example.com", CauseResource: "foos", Writes: 1}},
	}}}
	require.True(t, proto.Equal(usual, Bounded(usual)))

	hostile := &meshv1.Usage{Requests: math.MaxUint64, Resources: []*meshv1.ResourceUsage{{Resource: "not a name"}, {
		Resource: "pods", Writes: math.MaxUint64,
		Namespaces: []*meshv1.NamespaceWrites{{Namespace: "a/b"}, {Namespace: strings.Repeat("a", 1000)}},
		Objects:    []*meshv1.ObjectWrites{{Namespace: "a", Name: "a\x1b[2J"}, {Namespace: "a", Name: strings.Repeat("a", 1000)}, {Namespace: "a"}},
		Cross:      []*meshv1.CrossWrites{{Namespace: "a/b", CauseResource: "foos"}, {Namespace: "a", CauseResource: "a\x1b[2J"}},
	}}}
	got := Bounded(hostile)
	require.EqualValues(t, maxCount, got.GetRequests())
	require.Len(t, got.GetResources(), 1)
	require.EqualValues(t, maxCount, got.GetResources()[0].GetWrites())
	require.Empty(t, got.GetResources()[0].GetNamespaces())
	require.Empty(t, got.GetResources()[0].GetObjects())
	require.Empty(t, got.GetResources()[0].GetCross())

	many := &meshv1.Usage{}
	for i := range 500 {
		one := &meshv1.ResourceUsage{Resource: fmt.Sprintf("r%d", i)}
		for j := range 10 {
			one.Namespaces = append(one.Namespaces, &meshv1.NamespaceWrites{Namespace: fmt.Sprintf("n%d", j)})
			one.Cross = append(one.Cross, &meshv1.CrossWrites{Namespace: "a", CauseResource: fmt.Sprintf("r%d", j)})
			one.Objects = append(one.Objects, &meshv1.ObjectWrites{Namespace: "a", Name: fmt.Sprintf("o%d", j)})
		}
		many.Resources = append(many.Resources, one)
	}
	namespaces, objects, cross := 0, 0, 0
	for _, r := range Bounded(many).GetResources() {
		namespaces, objects, cross = namespaces+len(r.GetNamespaces()), objects+len(r.GetObjects()), cross+len(r.GetCross())
	}
	require.Len(t, Bounded(many).GetResources(), meshv1.MaxUsageResources)
	require.Equal(t, meshv1.MaxUsageNamespaces, namespaces)
	require.Equal(t, meshv1.MaxUsageObjects, objects)
	require.Equal(t, meshv1.MaxUsageCross, cross)
}
