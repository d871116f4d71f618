package platform

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func parse(t *testing.T, text string) *Settings {
	t.Helper()
	s, err := Parse(map[string]string{Key: text})
	require.NoError(t, err)
	return s
}

func resource(text string) schema.GroupResource { return schema.ParseGroupResource(text) }

func TestAbsentFieldsHaveDefaults(t *testing.T) {
	require.Equal(t, Default(), parse(t, ""))
	require.Equal(t, Default(), parse(t, "stamping: {}"))
	s := parse(t, "stamping: {excludedResources: []}")
	require.Empty(t, s.Stamping.ExcludedResources)
	require.Equal(t, Default().Stamping.ExcludedNamespaces, s.Stamping.ExcludedNamespaces)
}

func TestRequestTimeout(t *testing.T) {
	require.Equal(t, time.Minute, Default().APIServer.RequestTimeout.Duration)
	require.Equal(t, 5*time.Minute, parse(t, "apiserver: {requestTimeout: 5m}").APIServer.RequestTimeout.Duration)
	for _, text := range []string{"0s", "-1s", "1500ms", "2h", "60"} {
		_, err := Parse(map[string]string{Key: "apiserver: {requestTimeout: " + text + "}"})
		require.Error(t, err, text)
	}
}

func TestParseIsStrict(t *testing.T) {
	for name, text := range map[string]string{
		"unknown field":    "stamping: {excludedResource: [secrets]}",
		"a type":           "stamping: {excludedResources: secrets}",
		"twice":            "stamping: {}\nstamping: {}",
		"all resources":    "sharding: {excludedResources: ['*']}",
		"a resource":       "stamping: {excludedResources: [core/secrets]}",
		"a namespace":      "stamping: {excludedNamespaces: ['kube-*']}",
		"a pattern":        "sharding: {namespaces: ['team_*']}",
		"an empty pattern": "sharding: {namespaces: ['']}",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse(map[string]string{Key: text})
			require.Error(t, err)
		})
	}
	_, err := Parse(map[string]string{"platform.yml": ""})
	require.ErrorContains(t, err, Key)
}

func TestStampingExcludes(t *testing.T) {
	d := Default()
	for r, stamps := range map[string]bool{
		"secrets": false, "leases.coordination.k8s.io": false, "shardingconfigs.ctrlmesh.kusionstack.io": false,
		"configmaps": true, "secrets.example.com": true,
	} {
		require.Equal(t, stamps, d.Stamps(resource(r)), r)
	}
	require.False(t, d.Stamps(schema.GroupResource{Group: "*", Resource: "secrets"}))
	require.True(t, d.Stamps(schema.GroupResource{Group: "*", Resource: "pods"}))
	require.False(t, d.StampsIn("kube-system"))
	require.True(t, d.StampsIn("default"))

	everything := parse(t, "stamping: {excludedResources: [], excludedNamespaces: []}")
	require.True(t, everything.Stamps(resource("secrets")))
	require.True(t, everything.StampsIn("kube-system"))
	require.False(t, everything.Stamps(resource("circuitbreakers.ctrlmesh.kusionstack.io")), "the mesh's own kinds always are")
	require.False(t, parse(t, `stamping: {excludedResources: ["*.example.com"]}`).Stamps(resource("foos.example.com")))
}

func TestShardingExcludes(t *testing.T) {
	require.True(t, Default().Divides(resource("secrets")))
	require.False(t, Default().Divides(resource("shardingconfigs.ctrlmesh.kusionstack.io")))
	s := parse(t, "sharding: {excludedResources: [secrets], namespaces: [team-*, operators]}")
	require.False(t, s.Divides(resource("secrets")))
	require.True(t, s.Divides(resource("pods")))
	require.False(t, s.Divides(schema.GroupResource{Resource: "*"}), "all of the core group")
	require.True(t, s.Divides(resource("*.apps")))
	for namespace, allowed := range map[string]bool{"team-a": true, "operators": true, "operators-2": false, "default": false} {
		require.Equal(t, allowed, s.ConfigsIn(namespace), namespace)
	}
	require.True(t, Default().ConfigsIn("default"))
}
