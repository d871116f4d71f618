// Package fleet runs operator fleet, which manages other clusters through an aggregated API, on the
// cluster of tests/cluster.
//
//	site.go     the operator, its root, and the list of clusters
//	gateway.go  the aggregated API
//	member.go   the clusters: their apiservers, the work in them, and who did it
package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

const (
	// RootName is the name of the operator's root.
	RootName = "root"
	// Workload is the name of the operator's StatefulSet, account and image.
	Workload = "fleet"
	// Max is the largest number of members that the cluster can be given.
	Max = 4

	// within bounds a wait for what takes seconds on an idle machine.
	within = 4 * time.Minute
)

// Site is the operator with its members.
type Site struct {
	*kube.Cluster
	Home    string // the operator's namespace
	Members []*Member
}

// Install starts n members and the operator with a pod for each of shards. The caller must Remove it,
// also after an error.
func Install(ctx context.Context, c *kube.Cluster, home string, n int, shards int32) (*Site, error) {
	s := &Site{Cluster: c, Home: home}
	for i := range n {
		m, err := s.newMember(fmt.Sprintf("member%d", i+1))
		if err != nil {
			return s, err
		}
		s.Members = append(s.Members, m)
		if err := m.Start(ctx); err != nil {
			return s, err
		}
	}
	return s, kube.InOrder(ctx, s.createGateway, s.prepareMembers, s.list,
		func(ctx context.Context) error { return s.Create(ctx, s.root(shards)) },
		func(ctx context.Context) error { return s.run(ctx, shards) })
}

// Remove removes what is not in the operator's namespace. The aggregated API is the first: the
// deletion of namespaces waits for every registered API.
func (s *Site) Remove(ctx context.Context) error {
	err := client.IgnoreNotFound(s.Delete(ctx, s.apiService()))
	for _, m := range s.Members {
		err = errors.Join(err, m.Stop(ctx))
	}
	return err
}

func (s *Site) prepareMembers(ctx context.Context) error {
	for _, m := range s.Members {
		if err := m.prepare(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *Site) root(shards int32) *meshv1alpha1.ShardingConfig {
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Home, Name: RootName},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: fleetv1.Lock},
			Clusters:   []meshv1alpha1.ClusterPath{{PathPrefix: fleetv1.ClusterPaths}},
			Root: &meshv1alpha1.RootConfig{
				Prefix: "part", TargetStatefulSet: Workload, Key: meshv1alpha1.KeyCluster, OnChange: meshv1alpha1.OnChangeRelist,
				Auto:             &meshv1alpha1.AutoConfig{ShardingSize: shards, EveryShardReplicas: 1},
				ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{fleetv1.Group}, Resources: []string{"clusters"}}}}},
			},
		},
	}
}

// run runs the operator.
func (s *Site) run(ctx context.Context, replicas int32) error {
	owners, err := s.OwnedBy(ctx, s.Home)
	if err != nil {
		return err
	}
	labels := map[string]string{"app": Workload}
	meta := metav1.ObjectMeta{Namespace: s.Home, Name: Workload}
	return s.CreateAll(ctx,
		&corev1.ServiceAccount{ObjectMeta: meta},
		&rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: s.Home, OwnerReferences: owners},
			Rules: []rbacv1.PolicyRule{
				{APIGroups: []string{fleetv1.Group}, Resources: []string{"clusters"}, Verbs: []string{"get", "list", "watch"}},
				{APIGroups: []string{fleetv1.GatewayGroup}, Resources: []string{"clusters/proxy"}, Verbs: []string{"*"}},
				{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"*"}},
			},
		},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: s.Home, OwnerReferences: owners},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: s.Home},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: s.Home, Name: Workload}},
		},
		&appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels}, PodManagementPolicy: appsv1.ParallelPodManagement,
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": Workload, meshv1alpha1.EnableProxyLabel: "true"}},
				Spec: corev1.PodSpec{
					ServiceAccountName: Workload, TerminationGracePeriodSeconds: new(int64(5)),
					Containers: []corev1.Container{{
						Name: Workload, Image: "localhost/ctrlmesh/fleet:dev", ImagePullPolicy: corev1.PullIfNotPresent,
						Env: []corev1.EnvVar{{Name: "POD_NAMESPACE", Value: s.Home}},
					}},
				},
			},
		}})
}

// PermitToList permits the manager to list the clusters, as the root's status asks for.
func (s *Site) PermitToList(ctx context.Context) error {
	owners, err := s.OwnedBy(ctx, s.Home)
	if err != nil {
		return err
	}
	return s.Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: s.Home + "-list", OwnerReferences: owners, Labels: map[string]string{label.AggregateLabel: "true"}},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{fleetv1.Group}, Resources: []string{"clusters"}, Verbs: []string{"list"}}},
	})
}

// list has the apiserver list the clusters.
func (s *Site) list(ctx context.Context) error {
	owners, err := s.OwnedBy(ctx, s.Home)
	if err != nil {
		return err
	}
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "clusters." + fleetv1.Group, OwnerReferences: owners},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: fleetv1.Group, Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "clusters", Singular: "cluster", Kind: "Cluster", ListKind: "ClusterList"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: fleetv1.Version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object"}},
			}},
		},
	}
	// One of another run may not be deleted yet.
	if err := kube.UntilWithin(ctx, within, "the kind of clusters", func(ctx context.Context) error { return s.Create(ctx, crd) }); err != nil {
		return err
	}
	for _, m := range s.Members {
		listed := &unstructured.Unstructured{}
		listed.SetGroupVersionKind(schema.GroupVersionKind{Group: fleetv1.Group, Version: fleetv1.Version, Kind: "Cluster"})
		listed.SetName(m.Name)
		if err := kube.UntilWithin(ctx, within, "the list of clusters", func(ctx context.Context) error { return s.Create(ctx, listed) }); err != nil {
			return err
		}
	}
	return nil
}
