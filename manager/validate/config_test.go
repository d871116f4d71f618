package validate

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSharedObjects(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	with := func(entry string) string { return rooting + "\n  shared: [" + entry + "]\n" }
	for _, valid := range []string{
		`{apiGroups: [""], resources: [configmaps], namespaces: [kube-system], names: [extension-apiserver-authentication]}`,
		`{apiGroups: ["*"], resources: ["*"]}`,
		`{apiGroups: [rbac.authorization.k8s.io], resources: [clusterroles], names: ["system:node"], writes: Everyone}`,
	} {
		require.NoError(t, schema.judge(t, with(valid)), valid)
	}
	for entry, says := range map[string]string{
		`{apiGroups: [], resources: [pods]}`:                        "spec.root.shared[0].apiGroups: Invalid",
		`{apiGroups: [""], resources: []}`:                          "spec.root.shared[0].resources: Invalid",
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
		require.ErrorContains(t, schema.judge(t, with(entry)), says, entry)
	}
}

func TestMemberClusters(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	const path = "clusters: [{pathPrefix: /apis/cluster.karmada.io/v1alpha1/clusters/*/proxy}]\n"
	byCluster := strings.Replace(rooting, "inNamespaces: [a], ", "", 1) + "\n  key: Cluster\n"
	for name, c := range map[string]struct{ spec, says string }{
		"valid":           {byCluster + path, ""},
		"canary":          {strings.Replace(byCluster, `inShardHash: ["3"]`, "inClusters: [m1]", 1) + path, ""},
		"no paths":        {byCluster, "spec.root.key: Cluster"},
		"by namespace":    {rooting + "\n" + path, ""},
		"by object":       {strings.Replace(rooting, `  canary: {replicas: 1, inNamespaces: [a], inShardHash: ["3"]}`, "", 1) + "  key: Object\n" + path, "requires spec.root.key: Namespace or Cluster"},
		"by labels":       {rooting + "\n  method: Labels\n" + path, "nothing labels the objects of member clusters"},
		"no root":         {"selector: {matchLabels: {a: b}}\n" + path, "requires spec.root.key: Namespace or Cluster"},
		"no name":         {byCluster + "clusters: [{pathPrefix: /clusters/proxy}]\n", "spec.clusters[0].pathPrefix"},
		"two names":       {byCluster + "clusters: [{pathPrefix: /clusters/*/*}]\n", "spec.clusters[0].pathPrefix"},
		"fence":           {byCluster + path + "fence: Namespace\n", "no namespaces to fence"},
		"webhook":         {byCluster + path + "webhook: {port: 1, certDir: /a}\n", "reviews"},
		"same path twice": {byCluster + "clusters: [{pathPrefix: /clusters/*}, {pathPrefix: /clusters/*}]\n", "Duplicate"},
		"namespaces":      {rooting + "\n  key: Cluster\n" + path, "no namespaces to give to a canary"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := schema.judge(t, c.spec); c.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.says)
			}
		})
	}
	for _, path := range []string{"/apis/g/v1/clusters/*", "/*/proxy", "/clusters/../*/proxy", "/clusters/*/pro*xy"} {
		require.ErrorContains(t, schema.judge(t, byCluster+"clusters: [{pathPrefix: "+path+"}]\n"), "spec.clusters[0].pathPrefix: Invalid", path)
	}
}

func TestShadow(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	const alone, shadow, of = "selector: {matchLabels: {a: b}}\n", "shadow: {window: 30s}\n", "shadow: {of: op-1-normal, window: 30s}\n"
	for name, c := range map[string]struct{ spec, says string }{
		"valid":           {alone + shadow + "controller: {leaderElectionName: op}\n", ""},
		"root":            {rooting + "\n" + shadow, "excludes spec.root"},
		"webhook":         {alone + shadow + "webhook: {port: 1, certDir: /a}\n", "excludes spec.root, spec.webhook"},
		"dry run":         {alone + shadow + "dryRun: true\n", "spec.dryRun"},
		"fails open":      {alone + shadow + "failurePolicy: Open\n", "set failurePolicy to Closed"},
		"certificates":    {alone + shadow + "clientCertificates: Passthrough\n", "clientCertificates to Refuse"},
		"no limit at all": {alone, "spec.limits"},
		"of a shard":      {alone + of, ""},
		"limits twice":    {alone + of + "limits: [{selector: {matchLabels: {a: b}}}]\n", "remove spec.limits"},
		"locks twice":     {alone + of + "controller: {leaderElectionName: op}\n", "remove spec.limits and spec.controller"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := schema.judge(t, c.spec); c.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.says)
			}
		})
	}
	for _, window := range []string{"999ms", "5m1s", "300h"} {
		require.ErrorContains(t, schema.judge(t, alone+"shadow: {window: "+window+"}\n"), "must be from 1s to 5m", window)
	}
	require.NoError(t, schema.update(t, alone+shadow, alone+"shadow: {window: 1m}\n"))
	require.ErrorContains(t, schema.update(t, alone+shadow, alone), "whether spec.shadow is set is immutable")
}

func TestUserAgentIsReplacedOrPrefixed(t *testing.T) {
	schema := newCRD(t, "shardingconfigs")
	for text, says := range map[string]string{
		"userAgent: {value: a b}":          "",
		"userAgent: {prefix: 'a/ '}":       "",
		"userAgent: {}":                    "set one of value and prefix",
		"userAgent: {value: a, prefix: b}": "set one of value and prefix",
		"userAgent: {value: \"a\\nb\"}":    "spec.userAgent.value",
		"userAgent: {prefix: é}":           "spec.userAgent.prefix",
	} {
		if err := schema.judge(t, rooting+text+"\n"); says == "" {
			require.NoError(t, err, text)
		} else {
			require.ErrorContains(t, err, says, text)
		}
	}
	require.ErrorContains(t, schema.judge(t, "selector: {matchLabels: {a: b}}\nclientCertificates: Passthrough\nuserAgent: {value: a}\n"), "remove spec.limits, spec.controller, spec.root and spec.userAgent")
}
