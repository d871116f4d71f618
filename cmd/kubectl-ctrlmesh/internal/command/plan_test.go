package command

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

// planned is a root for a workload.
const planned = `apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: NAME, namespace: TEAM}
spec:
  controller: {leaderElectionName: LOCK}
  root:
    prefix: operator-demo
    targetRef: {kind: StatefulSet, name: WORKLOAD}
    auto: {shardingSize: SIZE, everyShardReplicas: 1}
    resourceSelector: [{relateResources: [{apiGroups: [""], resources: [RESOURCE]}]}]
`

func TestPlan(t *testing.T) {
	text := func(pairs ...string) string {
		return strings.NewReplacer(append(pairs, "NAME", "planned", "TEAM", team, "LOCK", "tally", "WORKLOAD", "tally", "SIZE", "2", "RESOURCE", "configmaps")...).Replace(planned)
	}
	byObject := strings.Replace(text(), "    auto:", "    key: Object\n    auto:", 1)
	// tenants adds namespaces with some ConfigMaps.
	tenants := func(c *meshtest.Cluster) {
		for i := range 9 {
			name := fmt.Sprint("tenant-", i)
			c.Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
			for j := range i + 1 {
				c.Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: fmt.Sprint("cm-", j)}})
			}
		}
		c.ManagerMay = func(string) bool { return true }
		c.Add(meshtest.Lease(team, "tally", "tally-0_1"))
		set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: meshtest.Operator}, Spec: appsv1.StatefulSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "od"}}}}
		c.Add(set)
		for i := range 2 {
			pod := meshtest.Pod(meshtest.Operator, fmt.Sprintf("%s-%d", meshtest.Operator, i), "node-1")
			pod.Labels = set.Spec.Selector.MatchLabels
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: set.Name, Controller: new(true)}}
			c.Add(pod)
		}
	}
	for _, c := range []struct {
		name, in string
		plant    func(*meshtest.Cluster)
		code     int
	}{
		{"plan-new", text(), tenants, Healthy},
		{"plan-lacks-pods", text("SIZE", "4"), tenants, Found},
		{"plan-at-work", text("NAME", "operator-demo", "TEAM", meshtest.Operator, "LOCK", "operator-leader", "WORKLOAD", "operator-demo", "SIZE", "3"), tenants, Found},
		{"plan-lock-of-another", text("TEAM", meshtest.Operator, "LOCK", "operator-leader", "WORKLOAD", "operator-demo"), tenants, Found},
		{"plan-no-lease", text("LOCK", "other"), tenants, Healthy},
		{"plan-no-workload", text("WORKLOAD", "none"), tenants, Found},
		{"plan-unknown-resource", text("RESOURCE", "configmap"), tenants, Found},
		{"plan-by-object", byObject, tenants, Healthy},
		{"plan-not-counted", text(), func(c *meshtest.Cluster) {
			tenants(c)
			c.ManagerMay = func(string) bool { return false }
			c.Forbidden = func(l client.ObjectList) error {
				if _, ok := l.(*metav1.PartialObjectMetadataList); ok {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "", errors.New("no"))
				}
				return nil
			}
		}, Healthy},
		{"plan-manager-unknown", text(), func(c *meshtest.Cluster) { tenants(c); c.ManagerMay = nil }, Healthy},
		{"plan-refused", text("SIZE", "0"), tenants, Unknown},
		{"plan-no-root", "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: s}\nspec:\n  selector: {matchLabels: {a: b}}\n  limits: [{relateResources: [{apiGroups: [apps], resources: [deployments]}], selector: {matchLabels: {a: b}}}]\n", tenants, Unknown},
	} {
		formats := []string{"table"}
		if c.name == "plan-at-work" {
			formats = []string{"table", "json", "yaml"}
		}
		for _, format := range formats {
			t.Run(c.name+"/"+format, func(t *testing.T) {
				cluster := outsideTheMesh(t)
				c.plant(cluster)
				r := run(t, cluster, c.in, "plan", "-f", "-", "-o", format)
				assert.Equal(t, c.code, r.code, "%s", r)
				requireGolden(t, c.name+"."+format, r)
			})
		}
	}
}
