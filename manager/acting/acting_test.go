package acting

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

const spec = `
controller: {leaderElectionName: lock}
limits:
- relateResources: [{apiGroups: [apps], resources: [deployments]}]
root:
  prefix: op
  targetRef: {kind: Deployment, name: op}
  auto: {shardingSize: 2, everyShardReplicas: 1}
  resourceSelector:
  - relateResources: [{apiGroups: [""], resources: [configmaps, secrets]}]
`

func parse(t *testing.T, text string) *v1alpha1.ShardingConfig {
	t.Helper()
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "uid"}}
	require.NoError(t, yaml.UnmarshalStrict([]byte(text), &c.Spec))
	return c
}

func TestEnact(t *testing.T) {
	discovered := v1alpha1.LockStatus{Namespace: "kube-system", Name: "found", Discovered: true}
	for name, tt := range map[string]struct {
		change func(s *v1alpha1.ShardingConfigSpec)
		fields []string
	}{
		"nothing":          {func(*v1alpha1.ShardingConfigSpec) {}, nil},
		"number of shards": {func(s *v1alpha1.ShardingConfigSpec) { s.Root.Auto.ShardingSize = 3 }, nil},
		"selector of a limit": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Limits[0].Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
		}, nil},
		"resources in other groups": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Root.ResourceSelector[0].RelateResources = append(s.Root.ResourceSelector[0].RelateResources, s.Limits[0].RelateResources...)
			s.Limits = nil
		}, nil},
		"defaults": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Root.Key, s.Root.Method, s.Root.ClusterScoped = v1alpha1.KeyNamespace, v1alpha1.MethodAuto, v1alpha1.ClusterScopedEveryone
		}, nil},
		"discovered lock named": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Controller.Locks = []v1alpha1.LockReference{{Namespace: "kube-system", Name: "found"}}
		}, nil},
		"discovered lock excluded": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Controller.ExcludedLocks = []v1alpha1.ExcludedLock{{Namespace: "kube-system", Name: "fou*"}}
		}, []string{"spec.controller"}},
		"another object excluded": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Controller.ExcludedLocks = []v1alpha1.ExcludedLock{{Namespace: "shared", Name: "found"}}
		}, nil},
		"lock renamed":  {func(s *v1alpha1.ShardingConfigSpec) { s.Controller.LeaderElectionName = "other" }, []string{"spec.controller"}},
		"lock removed":  {func(s *v1alpha1.ShardingConfigSpec) { s.Controller = nil }, []string{"spec.controller"}},
		"dry run":       {func(s *v1alpha1.ShardingConfigSpec) { s.DryRun = true }, []string{"spec.dryRun"}},
		"limit removed": {func(s *v1alpha1.ShardingConfigSpec) { s.Limits = nil }, []string{"spec.root.resourceSelector"}},
		"resource added and method changed": {func(s *v1alpha1.ShardingConfigSpec) {
			s.Root.ResourceSelector[0].RelateResources[0].Resources = append(s.Root.ResourceSelector[0].RelateResources[0].Resources, "pods")
			s.Root.Method = v1alpha1.MethodFilter
		}, []string{"spec.root.resourceSelector", "spec.root.method"}},
		"another workload": {func(s *v1alpha1.ShardingConfigSpec) { s.Root.TargetRef.Name = "other" }, []string{"spec.root.targetRef"}},
	} {
		t.Run(name, func(t *testing.T) {
			before := parse(t, spec)
			root := compile.Root{Acting: Of(&before.Spec), Locks: []v1alpha1.LockStatus{discovered}}
			written := parse(t, spec)
			tt.change(&written.Spec)
			asked := written.DeepCopy()
			configs := []*v1alpha1.ShardingConfig{written}
			changes := Enact(configs, func(*v1alpha1.ShardingConfig) (compile.Root, bool) { return root, true })
			require.Equal(t, asked, written, "the object itself stays")
			if tt.fields == nil {
				require.Empty(t, changes)
				require.Same(t, written, configs[0])
				return
			}
			require.Equal(t, map[types.UID]*Change{"uid": {Of(&asked.Spec), tt.fields}}, changes)
			require.Equal(t, root.Acting, Of(&configs[0].Spec))
			require.Equal(t, asked.Spec.Root.Auto, configs[0].Spec.Root.Auto)
		})
	}
}

// What is not on record, or not known, is taken from the spec.
func TestEnactWithoutRecord(t *testing.T) {
	for _, known := range []bool{false, true} {
		configs := []*v1alpha1.ShardingConfig{parse(t, spec)}
		require.Empty(t, Enact(configs, func(*v1alpha1.ShardingConfig) (compile.Root, bool) { return compile.Root{}, known }))
	}
}
