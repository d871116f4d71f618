package command

import (
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// oldCluster has an old kernel, an old apiserver, definitions without a field, and few permissions.
func oldCluster(t *testing.T, c *meshtest.Cluster) {
	c.Kubernetes = "v1.29.4"
	meshtest.Find[*corev1.Node](t, c, "", "node-2").Status.NodeInfo.KernelVersion = "5.4.0-200-generic"
	crd := meshtest.Find[*apiextensionsv1.CustomResourceDefinition](t, c, "", "shardingconfigs.ctrlmesh.kusionstack.io")
	delete(crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties, "shadow")
	meshtest.Find[*corev1.Namespace](t, c, "", snapshot.DefaultNamespace).Labels["pod-security.kubernetes.io/enforce"] = "restricted"
	c.MayCreate = func(resource string) bool { return resource != "clusterroles" }
}

// hindered has agents that are too old, objects in a version that is gone, a configuration that admission
// refuses, and a shard without a leader.
func hindered(t *testing.T, c *meshtest.Cluster) {
	losesLeader(t, c)
	meshtest.Find[*corev1.Pod](t, c, snapshot.DefaultNamespace, snapshot.Agent+"-1").Spec.Containers[0].Image = "registry.example.com/ctrlmesh/agent:v0.1.4"
	crd := meshtest.Find[*apiextensionsv1.CustomResourceDefinition](t, c, "", "shardingconfigs.ctrlmesh.kusionstack.io")
	crd.Status.StoredVersions = []string{"v1alpha0", "v1alpha1"}
	root(t, c).Spec.Root.Prefix = "Operator_Demo"
}

func TestUpgradeCheck(t *testing.T) {
	requireScenarios(t, []scenario{
		{name: "upgrade-check-healthy", plant: nothing, args: "upgrade check"},
		{name: "upgrade-check-hindered", plant: hindered, args: "upgrade check", code: Found},
		{name: "upgrade-check-unreachable", plant: unreachable, args: "upgrade check", code: Unknown, tables: true},
	})
}

func TestCheck(t *testing.T) {
	requireScenarios(t, []scenario{
		{name: "check-healthy", plant: nothing, args: "check"},
		{name: "check-no-agent", plant: losesAgent, args: "check", code: Found},
		{name: "check-forbidden", plant: forbids(&coordinationv1.LeaseList{}, "leases"), args: "check", code: Unknown, tables: true},
		{name: "check-uninstalled", plant: uninstalled, args: "check", code: Found, tables: true},
		{name: "check-unreachable", plant: unreachable, args: "check", code: Unknown, tables: true},
		{name: "check-pre-healthy", plant: nothing, args: "check --pre"},
		{name: "check-pre-old", plant: oldCluster, args: "check --pre", code: Found},
	})
}
