package proxy

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// sharing is owning, with objects that every shard reads.
func sharing(method meshv1.Method, of ...*meshv1.SharedObjects) *meshv1.Sharding {
	s := policytest.Owning("mine")
	s.Method, s.Shared = method, of
	s.Limits[0].Resources[0].Resources = []string{"pods", "namespaces", "configmaps"}
	return s
}

// TestListOfOneNameIsNarrowedAcrossNamespaces checks that it is not taken for one object.
func TestListOfOneNameIsNarrowedAcrossNamespaces(t *testing.T) {
	t.Parallel()
	m := newMesh(t, newFakeAPI(true, object("mine", "a"), object("theirs", "a"), object("", "a")))
	s := policytest.Divided(sharding.Keys("mine"), meshv1.Method_METHOD_AUTO)
	s.ReadAll = true
	m.policy(s)
	c := m.client(true)
	for target, want := range map[string][]string{
		"/api/v1/configmaps?fieldSelector=metadata.name%3Da":                   {"mine/a", "/a"},
		"/api/v1/namespaces/theirs/configmaps?fieldSelector=metadata.name%3Da": {"theirs/a"},
	} {
		names, _ := listed(t, jsonType, []byte(m.with(c, "GET", target, "", "Accept", jsonType).body))
		require.Equal(t, want, names)
	}
}

// TestListsKeepSharedObjects checks lists and watches of several objects of which some
// are shared, whatever the apiserver narrows itself.
func TestListsKeepSharedObjects(t *testing.T) {
	t.Parallel()
	objects := append(twenty(), object("kube-system", "ca"), object("kube-system", "other"), object("home", "config"))
	mine := sharding.Keys("ns-1")
	of := []*meshv1.SharedObjects{
		{Resources: policytest.Core("configmaps"), Namespaces: []string{"kube-system"}, Names: []string{"ca"}},
		{Resources: []*meshv1.ResourceGroup{{ApiGroups: []string{"*"}, Resources: []string{"*"}}}, Namespaces: []string{"home"}},
	}
	for _, sharded := range []bool{true, false} {
		api := newFakeAPI(sharded, objects...)
		m := newMesh(t, api)
		c := m.client(true)
		for _, method := range []meshv1.Method{meshv1.Method_METHOD_AUTO, meshv1.Method_METHOD_FILTER} {
			for n, key := range map[int]meshv1.Key{1: meshv1.Key_KEY_NAMESPACE, 2: meshv1.Key_KEY_OBJECT} {
				s := policytest.Divided(mine, method)
				s.Key = key
				own := inScope(mine)
				if n == 2 {
					s.Limits[0].Scope = sharding.Keys("uid-of-o-3").Proto()
					own = func(o metav1.PartialObjectMetadata) bool { return o.Name == "o-3" }
				}
				s.Shared = of
				m.policy(s)
				want := owned(objects, func(o metav1.PartialObjectMetadata) bool { return own(o) || o.Name == "ca" || o.Namespace == "home" })
				for form, accept := range forms {
					what := fmt.Sprintf("sharded=%t %v %v %s", sharded, method, key, form)
					require.Equal(t, want, m.all(c, "/api/v1/configmaps", accept[0], 0), what)
					require.Equal(t, want, m.watched(c, "/api/v1/configmaps?watch=1", accept[1]), what)
					require.Equal(t, []string{"kube-system/ca"}, m.all(c, "/api/v1/namespaces/kube-system/configmaps", accept[0], 0), what)
					require.Equal(t, []string{"home/config"}, m.all(c, "/api/v1/namespaces/home/configmaps", accept[0], 0), what)
				}
			}
		}
		s := policytest.Divided(mine, meshv1.Method_METHOD_AUTO)
		s.Shared = of[1:]
		m.policy(s)
		require.Equal(t, owned(objects, func(o metav1.PartialObjectMetadata) bool { return inScope(mine)(o) || o.Namespace == "home" }), m.all(c, "/api/v1/configmaps", jsonType, 0))
		sent, err := url.Parse(api.last(t).URI)
		require.NoError(t, err)
		require.Contains(t, sent.Query().Get("shardSelector"), "||", "the apiserver narrows to what is owned or shared")
	}
}

func TestSharingRelists(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*meshv1.Sharding){
		"reads":   func(s *meshv1.Sharding) { s.ReadAll = true },
		"shared":  func(s *meshv1.Sharding) { s.Shared = nil },
		"dry run": func(s *meshv1.Sharding) { s.DryRun = true },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, watches())
			of := &meshv1.SharedObjects{Resources: policytest.Core("configmaps"), Namespaces: []string{"theirs"}}
			m.restore(sharing(meshv1.Method_METHOD_AUTO, of), time.Time{})
			ended := m.open(m.client(true), "/api/v1/configmaps?watch=1&resourceVersion=5")
			m.policy(sharing(meshv1.Method_METHOD_AUTO, of)) // the same
			next := sharing(meshv1.Method_METHOD_AUTO, of)
			change(next)
			m.policy(next)
			require.NoError(t, <-ended)
		})
	}
}
