package trial

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// module writes files of an operator's module and returns its folder.
func module(t *testing.T, files map[string]string) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range files {
		file := filepath.Join(folder, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o444)) // as in the module cache
	}
	return folder
}

func TestReleaseStepsOfCertManager(t *testing.T) {
	o := certManager()
	b := &Built{Operator: o, Version: "v1.2.3", root: t.TempDir(), Module: module(t, map[string]string{
		"deploy/charts/cert-manager/Chart.template.yaml": "name: cert-manager\nversion: v0.1.0\nappVersion: v0.1.0\nannotations: {pre: \"{{IS_PRERELEASE}}\"}\n",
		"deploy/charts/cert-manager/templates/rbac.yaml": "kind: Role\n",
		"deploy/crds/b.yaml":                             "kind: B\n\n",
		"deploy/crds/a.yaml":                             "kind: A\n",
	})}
	chart, err := b.copied()
	require.NoError(t, err)
	require.Equal(t, "name: cert-manager\nversion: v1.2.3\nappVersion: v1.2.3\nannotations: {pre: \"false\"}\n", read(t, chart, "Chart.yaml"))
	require.Equal(t, "{{- if .Values.installCRDs }}\nkind: A\n---\nkind: B\n{{- end }}\n", read(t, chart, "templates/crds.yaml"))
	require.Equal(t, "kind: Role\n", read(t, chart, "templates/rbac.yaml"))
}

func TestReleaseStepsOfClusterAPI(t *testing.T) {
	b := &Built{Operator: clusterAPI(), Version: "v1.2.3", root: t.TempDir(), Module: module(t, map[string]string{
		"core/config/default/manager_image_patch.yaml": "      - image: gcr.io/staging/controller:main\n        name: manager\n",
		"core/config/default/manager_pull_policy.yaml": "        imagePullPolicy: Always\n",
		"core/config/rbac/role.yaml":                   "kind: ClusterRole\n",
	})}
	folder, err := b.copied()
	require.NoError(t, err)
	require.Equal(t, "      - image: registry.k8s.io/cluster-api/cluster-api-controller:v1.2.3\n        name: manager\n", read(t, folder, "manager_image_patch.yaml"))
	require.Equal(t, "        imagePullPolicy: IfNotPresent\n", read(t, folder, "manager_pull_policy.yaml"))
	require.Equal(t, "kind: ClusterRole\n", read(t, folder, "../rbac/role.yaml"), "what the kustomization refers to is copied, too")
}

func TestReleaseStepsOfPrometheusOperator(t *testing.T) {
	b := &Built{Operator: prometheusOperator(), root: t.TempDir(), Module: module(t, map[string]string{
		"kustomization.yaml": "resources:\n- bundle.yaml\n", "bundle.yaml": "kind: A\n", "main.go": "package main\n",
	})}
	folder, err := b.copied()
	require.NoError(t, err)
	require.Equal(t, "resources:\n- bundle.yaml\nnamespace: prometheus-operator\n", read(t, folder, "kustomization.yaml"))
	require.NoFileExists(t, filepath.Join(folder, "main.go"))
}

func TestReleaseStepWithoutEffectIsAnError(t *testing.T) {
	folder := module(t, map[string]string{"a.yaml": "image: x\n"})
	require.ErrorContains(t, edit(filepath.Join(folder, "a.yaml"), "imagePullPolicy: .*", "imagePullPolicy: Never"), "a.yaml has no")
}

func TestDefaultsOfVariables(t *testing.T) {
	require.Equal(t, `a=:8443 b=true,c= d=$(POD_NAMESPACE) e=${F}`, string(withDefaults([]byte(`a=${ADDRESS:=:8443} b=${B_1:=true},c=${C:=} d=$(POD_NAMESPACE) e=${F}`))))
}

func read(t *testing.T, folder, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, file))
	require.NoError(t, err)
	return string(text)
}
