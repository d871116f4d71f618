package operator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	// Name is the name of the operator's StatefulSet, program and root.
	Name = "tally"
	// Lock is the operator lock, in the operator's namespace.
	Lock = "tally-leader"

	manifests = "tests/operators/tally/deploy/"

	// refresh is how often the operator writes each object. A process that still caches an
	// object of another shard therefore tries to write it within this time.
	refresh = "1s"
)

// SettleTimeout bounds a change of shards: all pods of the operator may have to start,
// one after the other.
const SettleTimeout = 3 * time.Minute

// Operator is the test operator under a root, in a namespace of its own.
type Operator struct {
	*Operators
	Part              string
	Home              string // its namespace
	Writer            *Writer
	APIServerRestarts []time.Time
	// Trial is a tenant whose objects may wait for long, because bad versions are tried there.
	Trial string

	began kube.Mark
}

// NewRoot returns the root of the operator, from a spec that says how it is divided.
func (o *Operator) NewRoot(spec meshv1alpha1.ShardingConfigSpec) *meshv1alpha1.ShardingConfig {
	spec = *spec.DeepCopy()
	spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: Lock}
	spec.Root.Prefix = Name
	if spec.Root.TargetSelector == nil {
		spec.Root.TargetRef = &meshv1alpha1.TargetRef{Kind: "StatefulSet", Name: Name}
	}
	spec.Root.ResourceSelector = []meshv1alpha1.ObjectLimiter{{
		RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}}},
	}}
	return &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: Name}, Spec: spec}
}

// CreateStatefulSet creates the operator's StatefulSet, changed only in where it runs, how
// often it writes, and by edit unless that is nil.
func (o *Operator) CreateStatefulSet(ctx context.Context, replicas int32, edit func(*appsv1.StatefulSet)) error {
	text, err := os.ReadFile(filepath.Join(o.Root, manifests, "statefulset.yaml"))
	if err != nil {
		return fmt.Errorf("reading the operator's manifest: %w", err)
	}
	set := &appsv1.StatefulSet{}
	if err := yaml.UnmarshalStrict(text, set); err != nil {
		return fmt.Errorf("reading the operator's manifest: %w", err)
	}
	set.Namespace, set.Spec.Replicas = o.Home, &replicas
	pod := &set.Spec.Template.Spec
	pod.ServiceAccountName = harness.ProbeAccount
	pod.Containers[0].Args = append(pod.Containers[0].Args, "-refresh="+refresh)
	if class := o.Tenants.Class; class != "" {
		pod.Containers[0].Args = append(pod.Containers[0].Args, "-selector="+classLabel+"="+class)
	}
	if edit != nil {
		edit(set)
	}
	return o.CreateAll(ctx, set)
}

// StatefulSet returns the operator's StatefulSet, with its name alone.
func (o *Operator) StatefulSet() *appsv1.StatefulSet {
	return &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: Name}}
}

// allowWeighing permits the manager to count the objects, until the namespace is deleted.
func (o *Operator) allowWeighing(ctx context.Context) error {
	owners, err := o.OwnedBy(ctx, o.Home)
	if err != nil {
		return err
	}
	return o.CreateAll(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{
			Name: o.Home, OwnerReferences: owners,
			Labels: map[string]string{meshv1alpha1.GroupName + "/aggregate-to-stamp": "true"},
		},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}, Verbs: []string{"list"}}},
	})
}

// ShardingConfig returns the root of the operator.
func (o *Operator) ShardingConfig(ctx context.Context) (*meshv1alpha1.ShardingConfig, error) {
	root := &meshv1alpha1.ShardingConfig{}
	return root, failure.Wrap(o.Get(ctx, client.ObjectKey{Namespace: o.Home, Name: Name}, root), "reading the root")
}

// Change edits the root, and scales the operator to the pods that the root needs. It retries
// while the apiserver is unavailable.
func (o *Operator) Change(ctx context.Context, edit func(*meshv1alpha1.ShardingConfigSpec)) error {
	return o.Until(ctx, "the root to be changed", func(ctx context.Context) error {
		return retry.RetryOnConflict(retry.DefaultRetry, func() error {
			root, err := o.ShardingConfig(ctx)
			if err != nil {
				return err
			}
			edit(&root.Spec)
			if err := o.Update(ctx, root); err != nil {
				return err
			}
			set := o.StatefulSet()
			scale := &autoscalingv1.Scale{ObjectMeta: set.ObjectMeta, Spec: autoscalingv1.ScaleSpec{Replicas: replicasOf(root.Spec.Root)}}
			return o.SubResource("scale").Update(ctx, set, client.WithSubResourceBody(scale))
		})
	})
}

// Pods returns the pods of the operator that are not being deleted.
func (o *Operator) Pods(ctx context.Context) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := o.List(ctx, &list, client.InNamespace(o.Home), client.MatchingLabels{"app": Name})
	alive := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	return alive, failure.Wrap(err, "listing the operator's pods")
}

// Remove removes the operator and its root, and waits until both are deleted. The removal of a
// root is a handover, too.
func (o *Operator) Remove(ctx context.Context) error {
	root := &meshv1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: Name}}
	if err := errors.Join(
		o.DeleteAllOf(ctx, &appsv1.StatefulSet{}, client.InNamespace(o.Home)),
		client.IgnoreNotFound(o.Delete(ctx, root)),
	); err != nil {
		return fmt.Errorf("removing the operator: %w", err)
	}
	err := o.Until(ctx, "the operator's end", func(ctx context.Context) error {
		pods, err := o.Pods(ctx)
		if err != nil {
			return err
		}
		if len(pods) > 0 {
			return fmt.Errorf("%d pods are left", len(pods))
		}
		if err := o.Get(ctx, client.ObjectKeyFromObject(root), root); client.IgnoreNotFound(err) != nil {
			return err
		} else if err == nil {
			return errors.New("its root is left")
		}
		return nil
	})
	return errors.Join(err, client.IgnoreNotFound(o.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.Home}})))
}
