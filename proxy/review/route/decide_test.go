package route

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

func TestReviewsReachTheShardOfTheirNamespace(t *testing.T) {
	routes := func() *Routes {
		return &Routes{Shard: "one", Default: "two", Owners: []Owner{
			{"one", sharding.Keys("a")},
			{"two", sharding.Keys("b", "both")},
			{"three", sharding.Keys("both")},
		}}
	}
	about := func(namespace, resource, name string) Head {
		return Head{Review: Admission, Namespace: namespace, Name: name, Resource: schema.GroupVersionResource{Version: "v1", Resource: resource}}
	}
	for name, c := range map[string]struct {
		change   func(*Routes)
		head     Head
		received bool
		want     Decision
	}{
		"own namespace":                 {head: about("a", "pods", "x"), want: Decision{Local, "", Owned}},
		"another shard's":               {head: about("b", "pods", "x"), want: Decision{Forward, "two", Owned}},
		"another shard's, received":     {head: about("b", "pods", "x"), received: true, want: Decision{Local, "", Received}},
		"no shard's":                    {head: about("c", "pods", "x"), want: Decision{Local, "", Unknown}},
		"two shards'":                   {head: about("both", "pods", "x"), want: Decision{Local, "", Unknown}},
		"conversion":                    {head: Head{Review: Conversion}, want: Decision{Local, "", NoAdmission}},
		"a namespace itself":            {head: about("", "namespaces", "b"), want: Decision{Forward, "two", Owned}},
		"a namespace without a name":    {head: about("", "namespaces", ""), want: Decision{Forward, "two", ClusterScoped}},
		"cluster-scoped":                {head: about("", "nodes", "b"), want: Decision{Forward, "two", ClusterScoped}},
		"cluster-scoped, in that shard": {func(r *Routes) { r.Shard = "two" }, about("", "nodes", "b"), false, Decision{Local, "", ClusterScoped}},
		"cluster-scoped, no default":    {func(r *Routes) { r.Default = "" }, about("", "nodes", "b"), false, Decision{Local, "", ClusterScoped}},
		"keys are uids":                 {func(r *Routes) { r.ByUID = true }, about("b", "pods", "x"), false, Decision{Local, "", Unknown}},
		"no owners":                     {func(r *Routes) { r.Owners = nil }, about("b", "pods", "x"), false, Decision{Local, "", Unknown}},
		"shared": {func(r *Routes) {
			r.Shared = func(h Head) bool { return h.Namespace == "b" }
		}, about("b", "pods", "x"), false, Decision{Local, "", Shared}},
		"outside the limits": {func(r *Routes) {
			r.Limited = func(h Head) bool { return h.Namespace != "b" }
			r.Shared = func(Head) bool { return true }
		}, about("b", "pods", "x"), false, Decision{Allow, "", OutsideLimits}},
		"within the limits": {func(r *Routes) {
			r.Limited = func(h Head) bool { return h.Namespace == "b" }
		}, about("b", "pods", "x"), false, Decision{Forward, "two", Owned}},
	} {
		t.Run(name, func(t *testing.T) {
			r := routes()
			if c.change != nil {
				c.change(r)
			}
			require.Equal(t, c.want, r.Decide(c.head, c.received))
		})
	}
}
