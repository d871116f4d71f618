package check

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/crdschema"
)

// definitions returns the files of deploy/crd that the mesh needs, with or without those of its
// dialects.
func definitions(dialects bool) []string {
	return slices.DeleteFunc(crdschema.Names(), func(file string) bool { return !dialects && !strings.HasPrefix(file, v1alpha1.GroupName+"_") })
}

// definitionName returns the name of the CustomResourceDefinition in a file.
func definitionName(file string) string {
	group, plural, _ := strings.Cut(file, "_")
	return plural + "." + group
}

func definitionNames() []string {
	return collect.Map(definitions(true), definitionName)
}

// Names of cluster-wide objects of deploy/manager.
var (
	mutatingNames   = []string{"ctrlmesh", "ctrlmesh-stamp", "ctrlmesh-virtualapps"}
	validatingNames = []string{"ctrlmesh"}
	policyNames     = []string{
		"ctrlmesh-bindings", "ctrlmesh-locks", "ctrlmesh-manager-configs", "ctrlmesh-manager-creates", "ctrlmesh-manager-grants", "ctrlmesh-manager-leases",
		"ctrlmesh-manager-objects", "ctrlmesh-manager-webhooks", "ctrlmesh-namespaces", "ctrlmesh-pods",
	}
)

// Webhooks of the configurations ctrlmesh, and those of the dialects.
var (
	mutatingWebhooks          = []string{"pods.ctrlmesh.kusionstack.io"}
	mutatingDialectWebhooks   = []string{"pods.kridge.kusionstack.io"}
	validatingWebhooks        = []string{"circuitbreakers.ctrlmesh.kusionstack.io", "faultinjections.ctrlmesh.kusionstack.io", "shardingconfigs.ctrlmesh.kusionstack.io"}
	validatingDialectWebhooks = []string{"shardingconfigs.kridge.kusionstack.io", "trafficpolicies.ctrlmesh.kruise.io", "virtualapps.ctrlmesh.kruise.io"}
)

// servesDialects reports whether the manager serves the kinds of the dialects.
func servesDialects(s *snapshot.Snapshot) bool {
	if s.Mesh.Manager == nil {
		return true
	}
	return !slices.ContainsFunc(s.Mesh.Manager.Spec.Template.Spec.Containers, func(c corev1.Container) bool { return slices.Contains(c.Args, "--dialects=false") })
}
