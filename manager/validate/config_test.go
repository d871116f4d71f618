package validate

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSharedObjects(t *testing.T) {
	with := func(entry string) string { return rooting + "\n  shared: [" + entry + "]\n" }
	for _, valid := range []string{
		`{apiGroups: [""], resources: [configmaps], namespaces: [kube-system], names: [extension-apiserver-authentication]}`,
		`{apiGroups: ["*"], resources: ["*"]}`,
		`{apiGroups: [rbac.authorization.k8s.io], resources: [clusterroles], names: ["system:node"], writes: Everyone}`,
	} {
		require.Empty(t, Config(config(t, "r", with(valid))), valid)
	}
	for entry, says := range map[string]string{
		`{apiGroups: [], resources: [pods]}`:                        "spec.root.shared[0].apiGroups: Required",
		`{apiGroups: [""], resources: []}`:                          "spec.root.shared[0].resources: Required",
		`{apiGroups: ["", "*"], resources: [pods]}`:                 `"*" must be alone`,
		`{apiGroups: [""], resources: [pods, "*"]}`:                 `"*" must be alone`,
		`{apiGroups: [""], resources: [pods/status]}`:               "write pods",
		`{apiGroups: [A], resources: [pods]}`:                       "spec.root.shared[0].apiGroups[0]: Invalid",
		`{apiGroups: [""], resources: [pods], namespaces: ["a.b"]}`: "spec.root.shared[0].namespaces[0]: Invalid",
		`{apiGroups: [""], resources: [pods], namespaces: ["*"]}`:   "leave the list empty for all",
		`{apiGroups: [""], resources: [pods], names: ["a/b"]}`:      "spec.root.shared[0].names[0]: Invalid",
		`{apiGroups: [""], resources: [pods], names: [""]}`:         "spec.root.shared[0].names[0]: Invalid",
		`{apiGroups: [""], resources: [pods], names: [a, "*"]}`:     "spec.root.shared[0].names[1]: Invalid",
	} {
		require.ErrorContains(t, Config(config(t, "r", with(entry))).ToAggregate(), says, entry)
	}
}
