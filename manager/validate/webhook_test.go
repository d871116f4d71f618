package validate

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

const byNamespace = `
selector: {matchLabels: {shard: "0"}}
limits:
- relateResources: [{apiGroups: [""], resources: [configmaps]}]
  selector: {matchExpressions: [{key: ctrlmesh.kusionstack.io/namespace, operator: In, values: [a]}]}
`

func TestPlatformSettingsAreEnforced(t *testing.T) {
	tight, err := platform.Parse(map[string]string{platform.Key: "sharding: {excludedResources: [configmaps], namespaces: [team-*]}"})
	require.NoError(t, err)
	require.Empty(t, permitted(config(t, "c", byNamespace), platform.Default(), "mesh"))
	for name, c := range map[string]struct{ old, new, setting string }{
		"Secrets":                     {"[configmaps]", "[secrets]", platform.StampingExcludedResources},
		"Secrets of any group":        {`[""], resources: [configmaps]`, `["*"], resources: [secrets]`, platform.StampingExcludedResources},
		"Leases":                      {`[""], resources: [configmaps]`, "[coordination.k8s.io], resources: [leases]", platform.StampingExcludedResources},
		"the mesh's own kinds":        {`[""], resources: [configmaps]`, "[ctrlmesh.kusionstack.io], resources: [shardingconfigs]", platform.ShardingExcludedResources},
		"kube-system":                 {"[a]", "[a, kube-system]", platform.StampingExcludedNamespaces},
		"the namespace of the mesh":   {"[a]", "[mesh]", platform.StampingExcludedNamespaces},
		"kube-node-lease, as a label": {"{matchExpressions: [{key: ctrlmesh.kusionstack.io/namespace, operator: In, values: [a]}]}", "{matchLabels: {ctrlmesh.kusionstack.io/namespace: kube-node-lease}}", platform.StampingExcludedNamespaces},
	} {
		t.Run(name, func(t *testing.T) {
			changed := strings.Replace(byNamespace, c.old, c.new, 1)
			require.NotEqual(t, byNamespace, changed)
			require.Contains(t, permitted(config(t, "c", changed), platform.Default(), "mesh"), c.setting+" of ConfigMap mesh/ctrlmesh-platform")
		})
	}
	t.Run("namespaces of configurations", func(t *testing.T) {
		require.Contains(t, permitted(config(t, "c", byNamespace), tight, "mesh"), platform.ShardingNamespaces)
	})
	t.Run("resources that may not be divided", func(t *testing.T) {
		c := config(t, "c", byNamespace)
		c.Namespace = "team-a"
		require.Contains(t, permitted(c, tight, "mesh"), platform.ShardingExcludedResources)
	})
	t.Run("selectors by labels of one's own need no stamps", func(t *testing.T) {
		own := strings.NewReplacer("[configmaps]", "[secrets]", "ctrlmesh.kusionstack.io/namespace", "bucket").Replace(byNamespace)
		require.Empty(t, permitted(config(t, "c", own), platform.Default(), "mesh"))
	})
	t.Run("subsets share what \"*\" must not divide", func(t *testing.T) {
		const all = "root: {prefix: op, targetSelector: {matchLabels: {app: op}}, resourceSelector: [{relateResources: [{apiGroups: ['*'], resources: ['*']}]}]}"
		c := config(t, "c", all)
		require.Empty(t, permitted(c, platform.Default(), "mesh"))
		r := handle(t, admissionv1.Create, c, nil)
		require.True(t, r.Allowed, r.Result)
		require.Equal(t, []string{"the mesh or its administrator excludes *.ctrlmesh.kusionstack.io from division: every subset reads and writes these resources"}, r.Warnings)
		c.Namespace = "team-a"
		require.Empty(t, permitted(c, tight, "mesh"))
		w := &Webhook{Settings: func() *platform.Settings { return tight }}
		require.Contains(t, w.warnings(c)[0], "configmaps")
		named := config(t, "c", strings.NewReplacer("apiGroups: ['*']", "apiGroups: ['']", "resources: ['*']", "resources: [configmaps]").Replace(all))
		named.Namespace = "team-a"
		require.Contains(t, permitted(named, tight, "mesh"), platform.ShardingExcludedResources)
	})
	t.Run("resources that do not exist", func(t *testing.T) {
		w := &Webhook{Settings: platform.Default, Unknown: func(groups []v1alpha1.ResourceGroup) resources.Unknown {
			require.Equal(t, []string{"configmaps"}, groups[0].Resources)
			return resources.Unknown{Message: "configmaps: the apiserver serves no such resource"}
		}}
		require.Equal(t, []string{"configmaps: the apiserver serves no such resource; until it is, nothing is granted by this spec"}, w.warnings(config(t, "c", byNamespace)))
	})
	t.Run("the webhook refuses", func(t *testing.T) {
		c := config(t, "c", strings.Replace(byNamespace, "[configmaps]", "[secrets]", 1))
		r := handle(t, admissionv1.Create, c, nil)
		require.False(t, r.Allowed)
		require.Contains(t, r.Result.Message, platform.StampingExcludedResources)
	})
}
