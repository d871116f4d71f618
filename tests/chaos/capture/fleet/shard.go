package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// CreateShard creates a configuration whose members are the pods with its name as policy
// label. Of ConfigMaps they see one new namespace, owns, with one object. CreateShard waits
// until the manager has read the configuration: a pod that is created before belongs to no
// shard.
func (f *Fleet) CreateShard(ctx context.Context, home, name string, policy meshv1alpha1.FailurePolicy) (owns string, err error) {
	if owns, err = f.CreateNamespace(ctx, "owned"); err != nil {
		return "", err
	}
	c := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{harness.PolicyLabel: name}},
			Limits: []meshv1alpha1.ObjectLimiter{{
				RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}},
				Selector:        &metav1.LabelSelector{MatchLabels: map[string]string{meshv1alpha1.NamespaceLabel: owns}},
			}},
			FailurePolicy: policy,
		},
	}
	if err := f.CreateAll(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: owns, Name: objectName}}, c); err != nil {
		return "", err
	}
	return owns, f.UntilObject(ctx, "the manager to see ShardingConfig "+name, c, func() error {
		if s := c.Status; s.ObservedGeneration < c.Generation || s.Stamping == nil || !s.Stamping.Done {
			return errors.New("it has not seen it, or still stamps")
		}
		return nil
	})
}

// CapturedModes returns the capture modes of a configuration's members by name. The value is a
// message for a member that is not captured.
func (f *Fleet) CapturedModes(ctx context.Context, home, config string) (map[string]string, error) {
	c := &meshv1alpha1.ShardingConfig{}
	if err := f.Get(ctx, client.ObjectKey{Namespace: home, Name: config}, c); err != nil {
		return nil, fmt.Errorf("reading ShardingConfig %s: %w", config, err)
	}
	out := map[string]string{}
	for _, m := range c.Status.Pods {
		out[m.Name] = cmp.Or(m.Capture, m.Message)
	}
	return out, nil
}
