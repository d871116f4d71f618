package dialect

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
)

func shard(selector *metav1.LabelSelector) *kridge.ShardingConfig {
	out := &kridge.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a"}}
	out.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}
	out.Spec.Limits = []kridge.ObjectLimiter{{
		RelateResources: []kridge.ResourceGroup{{APIGroups: []string{"apps"}, Resources: []string{"deployments"}}}, Selector: selector,
	}}
	return out
}

func TestInvalidShardingConfigsAreRefused(t *testing.T) {
	for message, change := range map[string]func(*kridge.ShardingConfigSpec){
		"spec.selector: Required value: name the pods of this shard: an empty selector would take every pod of the namespace": func(s *kridge.ShardingConfigSpec) {
			s.Selector = nil
		},
		"spec.limits: Required value: list at least one limit: the resources that this shard divides and the selector of its part": func(s *kridge.ShardingConfigSpec) {
			s.Limits = nil
		},
		"spec.limits[0]: Forbidden: write relateResources and selector both within objectSelector, or both outside it": func(s *kridge.ShardingConfigSpec) {
			s.Limits[0].ObjectSelector = &kridge.ObjectSelector{RelateResources: s.Limits[0].RelateResources, Selector: s.Limits[0].Selector}
		},
		"spec.limits[0].objectSelector.relateResources: Required value: name the resources": func(s *kridge.ShardingConfigSpec) {
			s.Limits[0] = kridge.ObjectLimiter{ObjectSelector: &kridge.ObjectSelector{Selector: s.Limits[0].Selector}}
		},
		"spec.limits[0].selector: Required value: say which objects are this shard's: an empty selector would give it all of them": func(s *kridge.ShardingConfigSpec) {
			s.Limits[0].Selector = nil
		},
		"spec.controller: Forbidden: leaderElectionName and leaderElection.lockName both name the lock: set one of them": func(s *kridge.ShardingConfigSpec) {
			s.Controller = &kridge.ControllerConfiguration{LeaderElectionName: "a", LeaderElection: &kridge.LeaderElection{LockName: "b"}}
		},
		"spec.limits[0].selector.matchLabels[kridge.kusionstack.io/sharding-hash]: Forbidden: the mesh calls this label ctrlmesh.kusionstack.io/sharding-hash, which the selector also requires: remove one of them": func(s *kridge.ShardingConfigSpec) {
			s.Limits[0].Selector = selector("kridge.kusionstack.io/sharding-hash", "1", "kridge.kusionstack.io/shard-hash", "1")
		},
		"spec.root.canary.replicas: Required value: say how many pods the canary has, at least 1": func(s *kridge.ShardingConfigSpec) {
			s.Root = &kridge.RootConfig{Prefix: "a", TargetStatefulSet: "a", Canary: &kridge.CanaryConfig{InNamespaces: []string{"a"}}}
		},
	} {
		in := shard(selector("a", "1"))
		change(&in.Spec)
		_, errs := ShardingConfig(in)
		found := make([]string, len(errs))
		for i, err := range errs {
			found[i] = err.Error()
		}
		require.Contains(t, found, message)
	}
}

func TestShardsThatKridgeDerivedSelectNothing(t *testing.T) {
	in := shard(selector("a", "1"))
	in.Labels = map[string]string{kridge.RootLabel: "root"}
	out, errs := ShardingConfig(in)
	require.EqualError(t, errs.ToAggregate(), "metadata.labels[kridge.kusionstack.io/auto-sharding-root]: Forbidden: "+
		"Kridge derived this shard from ShardingConfig root, and the mesh derives its own: delete it")
	require.Nil(t, out.Config.Spec.Selector)
	require.Nil(t, out.Config.Spec.Root)
}

func TestLabelsOfKridgeBecomeThoseOfTheMesh(t *testing.T) {
	for from, to := range map[string]string{
		"kridge.kusionstack.io/namespace": v1alpha1.NamespaceLabel, "kridge.kusionstack.io/control": v1alpha1.ControlLabel,
		"kridge.kusionstack.io/sharding-hash": v1alpha1.ShardingHashLabel, "kridge.kusionstack.io/shard-hash": v1alpha1.ShardingHashLabel,
		"kridge.kusionstack.io/other": "kridge.kusionstack.io/other",
	} {
		in := selector(from, "1")
		in.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: from, Operator: metav1.LabelSelectorOpIn, Values: []string{"1", "2"}}}
		out, errs := ShardingConfig(shard(in))
		require.Empty(t, errs)
		want := selector(to, "1")
		want.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: to, Operator: metav1.LabelSelectorOpIn, Values: []string{"1", "2"}}}
		require.Equal(t, want, out.Config.Spec.Limits[0].Selector)
		var warnings []string
		if to == v1alpha1.ShardingHashLabel {
			warnings = []string{"spec.limits[0].selector: " + otherBuckets}
		}
		require.Equal(t, warnings, out.Warnings)
	}
}
