package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	operatorName   = "tally"
	operatorLock   = "tally-leader"
	operatorDeploy = "tests/operators/tally/deploy/"
)

var operatorLabels = client.MatchingLabels{"app": operatorName}

// setting is a configuration of the operator, in a namespace of its own. Its pods run only
// during its turn.
type setting struct {
	*bench
	shards int32 // 0: one pod that is not on the mesh
	byHand int32 // pods outside the mesh, each configured with its part of the objects
}

// byHand is the number of parts for which the objects have labels.
const (
	byHand    = 5
	partLabel = "bench.ctrlmesh.io/part"
)

func (s *setting) String() string {
	switch {
	case s.byHand > 0:
		return fmt.Sprintf("%d parts by hand, off the mesh", s.byHand)
	case s.shards == 0:
		return "unsharded, off the mesh"
	case s.shards == 1:
		return "1 shard"
	}
	return fmt.Sprintf("%d shards", s.shards)
}

func (s *setting) namespace() string {
	if s.byHand > 0 {
		return "bench-by-hand"
	}
	return fmt.Sprintf("bench-%d", s.shards)
}

func (s *setting) pods() int32 { return max(1, s.shards, s.byHand) }

// make creates all objects of the setting except pods.
func (s *setting) make(ctx context.Context) error {
	home := metav1.ObjectMeta{Namespace: s.namespace(), Name: operatorName}
	set, err := s.statefulSet(home)
	if err != nil {
		return err
	}
	objects := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: home.Namespace}},
		&corev1.ServiceAccount{ObjectMeta: home},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: home.Namespace},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: operatorName},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: home.Namespace, Name: home.Name}}},
		&rbacv1.RoleBinding{ObjectMeta: home,
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"}, // for lock and events
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: home.Namespace, Name: home.Name}}},
		set,
	}
	if s.shards > 0 {
		objects = append(objects, &meshv1alpha1.ShardingConfig{ObjectMeta: home, Spec: meshv1alpha1.ShardingConfigSpec{
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: operatorLock},
			Root: &meshv1alpha1.RootConfig{
				Prefix: operatorName, TargetStatefulSet: operatorName,
				Auto: &meshv1alpha1.AutoConfig{ShardingSize: s.shards, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
				ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
					{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}}}}},
			},
		}})
	}
	if err := s.CreateAll(ctx, objects...); err != nil || s.shards == 0 {
		return err
	}
	return s.observed(ctx, home.Namespace)
}

// statefulSet returns the operator's StatefulSet, in the setting's namespace and without pods.
func (s *setting) statefulSet(home metav1.ObjectMeta) (*appsv1.StatefulSet, error) {
	text, err := os.ReadFile(filepath.Join(s.Root, operatorDeploy, "statefulset.yaml"))
	if err != nil {
		return nil, fmt.Errorf("reading the operator's manifest: %w", err)
	}
	set := &appsv1.StatefulSet{}
	if err := yaml.UnmarshalStrict(text, set); err != nil {
		return nil, fmt.Errorf("reading the operator's manifest: %w", err)
	}
	set.ObjectMeta, set.Spec.Replicas = home, new(int32(0))
	if s.shards == 0 {
		delete(set.Spec.Template.Labels, meshv1alpha1.EnableProxyLabel)
	}
	container := &set.Spec.Template.Spec.Containers[0]
	container.Env = append(container.Env, corev1.EnvVar{Name: "POD_INDEX", ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels['" + appsv1.PodIndexLabel + "']"}}})
	return set, nil
}

// start runs the operator's pods, with more flags, until all shards work.
func (s *setting) start(ctx context.Context, flags ...string) error {
	err := s.edit(ctx, func(set *appsv1.StatefulSet) {
		set.Spec.Replicas = new(s.pods())
		args := []string{"-lock=" + operatorLock}
		if s.byHand > 0 {
			args = []string{"-lock=" + operatorLock + "-$(POD_INDEX)", "-selector=" + partLabel + "=$(POD_INDEX)"}
		}
		set.Spec.Template.Spec.Containers[0].Args = append(args, flags...)
	})
	if err != nil {
		return err
	}
	return until(ctx, s.String(), func(ctx context.Context) error {
		set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace(), Name: operatorName}}
		if err := s.RolledOut(ctx, set); err != nil || s.shards == 0 {
			return err
		}
		_, err := s.settled(ctx, s.namespace(), s.shards)
		return err
	})
}

// stop stops the operator's pods.
func (s *setting) stop(ctx context.Context) error {
	if err := s.edit(ctx, func(set *appsv1.StatefulSet) { set.Spec.Replicas = new(int32(0)) }); err != nil {
		return err
	}
	return until(ctx, s.String()+" to end", func(ctx context.Context) error {
		var pods corev1.PodList
		return kube.Empty(&pods, s.List(ctx, &pods, client.InNamespace(s.namespace())))
	})
}

func (s *setting) edit(ctx context.Context, change func(*appsv1.StatefulSet)) error {
	return until(ctx, "the operator to be changed", func(ctx context.Context) error {
		set := &appsv1.StatefulSet{}
		if err := s.Get(ctx, client.ObjectKey{Namespace: s.namespace(), Name: operatorName}, set); err != nil {
			return err
		}
		change(set)
		return s.Update(ctx, set)
	})
}

// shares returns each pod's part of some namespaces.
func (s *setting) shares(ctx context.Context, namespaces []string) (map[string]float64, error) {
	if s.shards == 0 {
		shares := map[string]float64{}
		for i := range s.pods() {
			shares[fmt.Sprintf("%s-%d", operatorName, i)] = 1 / float64(s.pods())
		}
		return shares, nil
	}
	root, err := s.settled(ctx, s.namespace(), s.shards)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for _, a := range root.Status.Root.Assignments {
		i := slices.IndexFunc(root.Status.Root.Shards, func(shard meshv1alpha1.ShardStatus) bool { return shard.Name == a.Shard })
		if i < 0 {
			return nil, fmt.Errorf("%s belongs to %s, which is no shard", a.Name, a.Shard)
		}
		held, err := sharding.Parse(root.Status.Root.Shards[i].Held)
		if err != nil {
			return nil, fmt.Errorf("what %s holds: %w", a.Shard, err)
		}
		for _, ns := range namespaces {
			if held.Owns(ns) {
				out[a.Name] += 1 / float64(len(namespaces))
			}
		}
	}
	return out, nil
}

// observed waits until the manager has seen a root: a pod created before would be in no shard.
func (b *bench) observed(ctx context.Context, namespace string) error {
	return until(ctx, "the manager to see the root", func(ctx context.Context) error {
		root := &meshv1alpha1.ShardingConfig{}
		if err := b.Get(ctx, client.ObjectKey{Namespace: namespace, Name: operatorName}, root); err != nil {
			return err
		}
		if root.Status.ObservedGeneration < root.Generation {
			return errors.New("it has not")
		}
		return nil
	})
}

// settled returns a root, and an error unless it has all members and no handover.
func (b *bench) settled(ctx context.Context, namespace string, members int32) (*meshv1alpha1.ShardingConfig, error) {
	root := &meshv1alpha1.ShardingConfig{}
	if err := b.Get(ctx, client.ObjectKey{Namespace: namespace, Name: operatorName}, root); err != nil {
		return nil, err
	}
	switch is := root.Status; {
	case is.ObservedGeneration < root.Generation || is.Root == nil:
		return nil, errors.New("the manager has not seen the root yet")
	case is.ReadyMembers != members || is.Root.Handover != "Settled":
		return nil, fmt.Errorf("%d of %d members are ready, and what is held is %s", is.ReadyMembers, members, is.Root.Handover)
	}
	return root, nil
}
