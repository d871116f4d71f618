// Command render writes the plain manifests of the mesh: the templates of the chart, each
// with the default values and with what is off by default.
//
//	render CHART DEPLOY
package main

import (
	"fmt"
	"io"
	"log"
	"os"
	"path"
	"path/filepath"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

// manifests are the files below DEPLOY, by template.
var manifests = map[string]string{
	"manager/rbac.yaml":              "manager/rbac.yaml",
	"manager/webhooks.yaml":          "manager/webhooks.yaml",
	"manager/locks.yaml":             "manager/locks.yaml",
	"manager/confinement.yaml":       "manager/confinement.yaml",
	"manager/deployment.yaml":        "manager/deployment.yaml",
	"manager/mutation.yaml":          "policies/mutation.yaml",
	"agent/rbac.yaml":                "agent/rbac.yaml",
	"agent/daemonset.yaml":           "agent/daemonset.yaml",
	"agent/service.yaml":             "agent/service.yaml",
	"monitoring/podmonitors.yaml":    "monitoring/podmonitors.yaml",
	"network-policies/policies.yaml": "components/network-policies/policies.yaml",
}

const header = "# Rendered from deploy/chart by make generate. Do not edit.\n"

func main() {
	log.SetOutput(io.Discard) // a line for each symbolic link of the chart
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: render CHART DEPLOY")
		os.Exit(1)
	}
	if err := render(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func render(chartDir, deployDir string) error {
	c, err := loader.Load(chartDir)
	if err != nil {
		return fmt.Errorf("loading the chart: %w", err)
	}
	release := chartutil.ReleaseOptions{Name: "ctrlmesh", Namespace: "ctrlmesh-system", IsInstall: true, Revision: 1}
	given := map[string]any{"podMonitor": map[string]any{"enabled": true}}
	capabilities := chartutil.DefaultCapabilities.Copy()
	capabilities.APIVersions = append(capabilities.APIVersions, "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")
	values, err := chartutil.ToRenderValues(c, given, release, capabilities)
	if err != nil {
		return fmt.Errorf("reading the values: %w", err)
	}
	rendered, err := engine.Render(c, values)
	if err != nil {
		return fmt.Errorf("rendering the chart: %w", err)
	}
	for template, file := range manifests {
		text, ok := rendered[path.Join(c.Name(), "templates", template)]
		if !ok {
			return fmt.Errorf("rendering the chart: it has no template %s", template)
		}
		if err := os.WriteFile(filepath.Join(deployDir, file), []byte(header+text), 0o644); err != nil {
			return fmt.Errorf("writing a manifest: %w", err)
		}
	}
	return nil
}
