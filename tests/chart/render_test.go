package chart

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
)

// everything turns on what is off by default.
var everything = []string{
	"--set", "podMonitor.enabled=true,prometheusRule.enabled=true,priorityClass.resourceQuota.enabled=true",
	"--set", "image.pullSecrets={registry},manager.clusterDomain=corp.example,agent.capture=iptables,agent.accessLog=true",
	"--set", "analysis.prometheus.url=https://prometheus.example,analysis.prometheus.tokenSecret=token,analysis.prometheus.caSecret=ca",
	"--set-json", `stamp.extraResources=[{"apiGroups":["example.com"],"resources":["foos"]}]`,
	"--api-versions", mutatingPolicy,
}

// mutatingPolicy is what Kubernetes serves from 1.36 on.
const mutatingPolicy = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"

func TestPlainManifestsEqualChartDefaults(t *testing.T) {
	plain := kustomized(t, filepath.Join(deployDir, "default"))
	delete(plain, "Namespace /"+meshSpace) // helm creates no namespace
	maps.Copy(plain, kustomized(t, filepath.Join(deployDir, "components", "network-policies")))
	chart := render(t, "--no-hooks")
	for key, obj := range chart {
		if obj.GetKind() == "CustomResourceDefinition" {
			assert.Equal(t, "keep", obj.GetAnnotations()["helm.sh/resource-policy"], key)
			unstructured.RemoveNestedField(obj.Object, "metadata", "annotations", "helm.sh/resource-policy")
		}
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(plain)), slices.Collect(maps.Keys(chart)))
	for key := range plain {
		assert.Equal(t, plain[key].Object, chart[key].Object, key)
	}
}

// The files of deploy/crd are what manifests and chart install, and what the manager and the plugin know.
func TestEachDefinitionIsInstalled(t *testing.T) {
	var native, all []string
	for _, name := range crdschema.Names() {
		group, plural, _ := strings.Cut(name, "_")
		name = "CustomResourceDefinition /" + plural + "." + group
		all = append(all, name)
		if group == v1alpha1.GroupName {
			native = append(native, name)
		}
	}
	for _, c := range []struct {
		installed objects
		want      []string
	}{
		{kustomized(t, filepath.Join(deployDir, "crd")), all}, {render(t), all}, {render(t, "--set", "dialects=false"), native},
	} {
		maps.DeleteFunc(c.installed, func(_ string, o *unstructured.Unstructured) bool { return o.GetKind() != "CustomResourceDefinition" })
		require.ElementsMatch(t, c.want, slices.Collect(maps.Keys(c.installed)))
	}
}

func TestMonitoringManifestsEqualChart(t *testing.T) {
	plain := kustomized(t, filepath.Join(deployDir, "monitoring"))
	chart := render(t, "--set", "podMonitor.enabled=true,prometheusRule.enabled=true")
	require.NotEmpty(t, plain)
	for key := range plain {
		require.Contains(t, chart, key)
		assert.Equal(t, plain[key].Object, chart[key].Object, key)
	}
}

func TestPoliciesEqualChart(t *testing.T) {
	plain := kustomized(t, filepath.Join(deployDir, "policies"))
	chart := render(t, "--no-hooks", "--api-versions", mutatingPolicy)
	for key := range render(t, "--no-hooks") {
		delete(chart, key)
	}
	require.Equal(t, plain, chart, "what is added where it is served")
}

func TestChartFitsAnyNamespace(t *testing.T) {
	text, err := template(t, chartDir, "mesh", everything...)
	require.NoError(t, err)
	for i, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(strings.TrimSpace(line), "#") {
			assert.NotContains(t, line, meshSpace, "line %d", i+1)
		}
	}
}

func TestRenderedObjectsDecodeStrictly(t *testing.T) {
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, apiextensionsv1.AddToScheme(scheme))
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for _, args := range [][]string{nil, everything, {"--set", "agent.cleanup=true"}} {
		for key, obj := range render(t, args...) {
			if obj.GroupVersionKind().Group == "monitoring.coreos.com" {
				continue // TestMonitoringManifestsEqualChart
			}
			data, err := obj.MarshalJSON()
			require.NoError(t, err)
			_, _, err = decoder.Decode(data, nil, nil)
			assert.NoError(t, err, key)
		}
	}
}

func TestPackagedChartRendersTheSame(t *testing.T) {
	dir := t.TempDir()
	_, err := helm(t, "package", chartDir, "--destination", dir)
	require.NoError(t, err)
	files, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	packaged, err := template(t, files[0], meshSpace, everything...)
	require.NoError(t, err)
	source, err := template(t, chartDir, meshSpace, everything...)
	require.NoError(t, err)
	require.Equal(t, source, packaged)
}
