package layout

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// subsets is a root whose subset v2 owns the namespaces of tier one, and v3 those of names that
// begin with "canary-".
func subsets() *v1alpha1.RootConfig {
	return &v1alpha1.RootConfig{
		Prefix: "op", TargetSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "op"}},
		Subsets: []v1alpha1.Subset{
			{Name: "v2", PodLabels: map[string]string{"version": "v2"}, Namespaces: []v1alpha1.NamespaceMatch{
				{Names: []string{"named"}}, {Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "one"}}}}},
			{Name: "v3", PodLabels: map[string]string{"version": "v3"}, Namespaces: []v1alpha1.NamespaceMatch{{Pattern: "^canary-"}}},
		},
	}
}

func resolved(t require.TestingT, root *v1alpha1.RootConfig, namespaces map[string]labels.Set) *v1alpha1.RootConfig {
	spec := v1alpha1.ShardingConfigSpec{Root: root}
	require.NoError(t, Resolve(&spec, namespaces))
	require.Empty(t, Validate(spec.Root, field.NewPath("spec", "root")))
	return spec.Root
}

func TestNamespacesBelongToTheFirstMatchingSubset(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	namespaces := map[string]labels.Set{}
	for i := range 40 {
		namespaces[fmt.Sprintf("%s-%d", []string{"canary", "team"}[i%2], i)] = nil
	}
	root := subsets()
	var last map[string]sharding.Scope
	for range 100 { // a namespace gets another label
		for name := range namespaces {
			if random.IntN(10) == 0 {
				namespaces[name] = labels.Set{"tier": []string{"one", "two"}[random.IntN(2)]}
			}
		}
		now := resolved(t, root, namespaces)
		next := Next(now, last, nil)
		whole(t, now, next)
		require.False(t, Repinned(now, next))
		for name, of := range namespaces {
			want := "op-default"
			switch {
			case of["tier"] == "one":
				want = "op-v2"
			case strings.HasPrefix(name, "canary-"):
				want = "op-v3"
			}
			require.True(t, next[want].Owns(name), "%s %s", name, of)
		}
		require.True(t, next["op-v2"].Owns("named"), "it does not exist yet")
		last = next
	}
}

func TestCanaryOwnsSelectedNamespaces(t *testing.T) {
	root := withCanary(auto(2), []string{"named"})
	root.Canary.InNamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "one"}}
	first := First(resolved(t, root, nil), nil)
	now := resolved(t, root, map[string]labels.Set{"a": {"tier": "one"}, "b": {"tier": "two"}})
	require.True(t, Repinned(now, first))
	next := Next(now, first, nil)
	whole(t, now, next)
	require.True(t, next["op-0-canary"].Equal(sharding.Keys("a", "named")))
	require.True(t, Next(resolved(t, root, nil), next, nil)["op-0-canary"].Equal(sharding.Keys("named")), "a lost its label")
	require.Equal(t, []string{"named"}, root.Canary.InNamespaces, "the object was changed")
}

func TestRootWithoutSelectorsResolvesToItself(t *testing.T) {
	root := withCanary(auto(2), []string{"a"})
	require.Same(t, root, resolved(t, root, map[string]labels.Set{"b": nil}))
}

func TestResolveRefusesTooManyNamespaces(t *testing.T) {
	namespaces := map[string]labels.Set{}
	for i := range MaxNamespaces + 1 {
		namespaces[fmt.Sprintf("canary-%d", i)] = nil
	}
	spec := v1alpha1.ShardingConfigSpec{Root: subsets()}
	require.EqualError(t, Resolve(&spec, namespaces), "subset v3 of spec.root.subsets: 1025 namespaces match, and at most 1024 can be assigned to one shard, so the last assignment stays: match fewer, or let spec.root.auto divide them")
	delete(namespaces, "canary-0")
	resolved(t, subsets(), namespaces)
}

// The subsets keep what they own, and the limits must not take it from them.
func TestLimitsAreResolvedBesideTooManyNamespaces(t *testing.T) {
	namespaces := map[string]labels.Set{"team-a": nil}
	for i := range MaxNamespaces + 1 {
		namespaces[fmt.Sprintf("canary-%d", i)] = nil
	}
	limits := []v1alpha1.ObjectLimiter{{Namespaces: []v1alpha1.NamespaceMatch{{Pattern: "^team-"}}}, {Namespaces: []v1alpha1.NamespaceMatch{{Names: []string{"b"}}}}}
	spec := v1alpha1.ShardingConfigSpec{Root: subsets(), Limits: limits}
	require.Error(t, Resolve(&spec, namespaces))
	require.Equal(t, []string{"team-a"}, Named(spec.Limits[0].Namespaces))
	require.Equal(t, subsets(), spec.Root)
	for i, l := range spec.Limits {
		require.Equal(t, limits[i], Written(l))
	}
}

func TestPlaceByLabels(t *testing.T) {
	var pods []*corev1.Pod
	for name, version := range map[string]string{"a": "v1", "b": "v2", "c": "v3", "d": "v2"} {
		p := pod(name, 1, "")
		p.Labels = map[string]string{"app": "op", "version": version}
		require.True(t, Selects(subsets())(p))
		pods = append(pods, p)
	}
	placed, outdated := Place(subsets(), 0, pods, nil)
	require.Empty(t, outdated)
	require.Equal(t, map[string]string{"a": "op-default", "b": "op-v2", "c": "op-v3", "d": "op-v2"}, placed)
	placed, outdated = Place(subsets(), 0, pods, members(map[string]string{"a": "op-v2", "b": "op-v2"}))
	require.Equal(t, []string{"a"}, outdated, "its label changed")
	require.Equal(t, map[string]string{"c": "op-v3", "d": "op-v2"}, placed)
	other := pod("e", 1, "")
	other.Labels = map[string]string{"app": "other"}
	require.False(t, Selects(subsets())(other))
}

func TestInvalidSubsetsAreRefused(t *testing.T) {
	for message, change := range map[string]func(*v1alpha1.RootConfig){
		"spec.root.subsets: Forbidden: auto and canary assign the pods of one workload: remove them, or remove subsets and name the workload by targetRef": func(r *v1alpha1.RootConfig) {
			r.Auto = &v1alpha1.AutoConfig{ShardingSize: 1, EveryShardReplicas: 1}
		},
		"spec.root.method: Forbidden: a shardSelector has at most 64 ranges, and subsets may need more: choose method Auto": func(r *v1alpha1.RootConfig) {
			r.Method = v1alpha1.MethodServerSide
		},
		"spec.root.subsets: Forbidden: objects are assigned by uid (key: Object), which leaves no namespaces to give to subsets: remove subsets, or choose key: Namespace": func(r *v1alpha1.RootConfig) {
			r.Key = v1alpha1.KeyObject
		},
		"spec.root.clusterScoped: Forbidden: objects in no namespace are assigned by uid, too (key: Object): choose Everyone": func(r *v1alpha1.RootConfig) {
			r.Subsets, r.Key, r.ClusterScoped = nil, v1alpha1.KeyObject, v1alpha1.ClusterScopedDefaultOnly
		},
		`spec.root.subsets[1].name: Duplicate value: "v2"`: func(r *v1alpha1.RootConfig) { r.Subsets[1].Name = "v2" },
		`spec.root.subsets[0].name: Duplicate value: "default"`: func(r *v1alpha1.RootConfig) {
			r.Subsets[0].Name = v1alpha1.DefaultSubset
		},
		"spec.root.subsets[0].podLabels: Required value: name the labels of its pods: it would have all pods": func(r *v1alpha1.RootConfig) {
			r.Subsets[0].PodLabels = nil
		},
		"spec.root.subsets[0].namespaces: Required value: match namespaces: the subset would own nothing": func(r *v1alpha1.RootConfig) {
			r.Subsets[0].Namespaces = nil
		},
		"spec.root.subsets[1].namespaces[0].pattern: Invalid value: \"(\": error parsing regexp: missing closing ): `(`": func(r *v1alpha1.RootConfig) {
			r.Subsets[1].Namespaces[0].Pattern = "("
		},
		`spec.root.subsets[0].namespaces[1].selector.matchExpressions[0].operator: Invalid value: "Like": not a valid selector operator`: func(r *v1alpha1.RootConfig) {
			r.Subsets[0].Namespaces[1].Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: "a", Operator: "Like"}}
		},
		"spec.root.targetSelector: Required value: an empty selector would take every pod of the namespace": func(r *v1alpha1.RootConfig) {
			r.TargetSelector = &metav1.LabelSelector{}
		},
		"spec.root.rollout: Forbidden: it replaces the pods of a StatefulSet: name one by targetRef, or remove rollout": func(r *v1alpha1.RootConfig) {
			r.Rollout = &v1alpha1.Rollout{}
		},
		"spec.root.targetRef: Required value: name the operator's pods by one of targetRef, targetSelector and targetStatefulSet": func(r *v1alpha1.RootConfig) {
			r.TargetStatefulSet = "op"
		},
	} {
		root := subsets()
		change(root)
		require.EqualError(t, Validate(root, field.NewPath("spec", "root")).ToAggregate(), message)
	}
}

func TestRootWithoutSubsetsIsOneShard(t *testing.T) {
	root := subsets()
	root.Subsets = nil
	first := First(resolved(t, root, nil), nil)
	require.True(t, first["op-default"].Everything())
	require.Len(t, first, 1)
	placed, _ := Place(root, 0, []*corev1.Pod{pod("a", 1, "")}, nil)
	require.Equal(t, map[string]string{"a": "op-default"}, placed)
}
