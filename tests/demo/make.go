package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// ours marks the demo's namespaces and its root.
var ours = client.MatchingLabels{"app.kubernetes.io/part-of": "tally-demo"}

// writers is how many requests the demo has in flight while it creates objects.
const writers = 8

// churnEvery is the time between two changes while the operator is adopted.
const churnEvery = 25 * time.Millisecond

func (d *demo) namespaceNames() []string {
	names := make([]string, d.namespaces)
	for i := range names {
		names[i] = fmt.Sprintf("demo-%02d", i)
	}
	return names
}

func (d *demo) makeNamespaces(ctx context.Context, names []string) error {
	for _, name := range names {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: ours}}
		if err := d.Create(ctx, ns); client.IgnoreAlreadyExists(err) != nil {
			return fmt.Errorf("creating namespace %s: %w", name, err)
		}
	}
	return nil
}

// makeObjects creates the objects from number first up to end, in the namespaces in turn.
func (d *demo) makeObjects(ctx context.Context, names []string, first, end int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := first; i < end; i++ {
		g.Go(func() error {
			t := &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{
				Namespace: names[i%len(names)],
				Name:      fmt.Sprintf("t-%02d", i/len(names)),
			}, Spec: tallyv1.TallySpec{Say: "hello"}}
			return failure.Wrap(d.Create(ctx, t), "creating Tally %s/%s", t.Namespace, t.Name)
		})
	}
	return g.Wait()
}

// makeOperator creates the StatefulSet of its manifest, outside the mesh.
func (d *demo) makeOperator(ctx context.Context) error {
	text, err := os.ReadFile(filepath.Join(d.Root, deploy, "statefulset.yaml"))
	if err != nil {
		return fmt.Errorf("reading the operator: %w", err)
	}
	set := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(text, &set.Object); err != nil {
		return fmt.Errorf("reading the operator: %w", err)
	}
	unstructured.RemoveNestedField(set.Object, "spec", "template", "metadata", "labels", meshv1alpha1.EnableProxyLabel)
	return d.ApplyObject(ctx, set)
}

// makeRoot creates the root, which shards the operator.
func (d *demo) makeRoot(ctx context.Context) error {
	c := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: operator, Name: workload, Labels: ours},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: lock},
			Root: &meshv1alpha1.RootConfig{
				Prefix:            workload,
				TargetStatefulSet: workload,
				Auto:              &meshv1alpha1.AutoConfig{ShardingSize: shards, EveryShardReplicas: 1},
				ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
					{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}},
				}}},
			},
		},
	}
	return failure.Wrap(d.Create(ctx, c), "creating ShardingConfig %s", c.Name)
}

// label sets the label of the mesh on the pod template, which starts a rolling update.
func (d *demo) label(ctx context.Context) error {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: operator, Name: workload}}
	patch := fmt.Appendf(nil, `{"spec": {"template": {"metadata": {"labels": {%q: "true"}}}}}`, meshv1alpha1.EnableProxyLabel)
	return failure.Wrap(d.Patch(ctx, set, client.RawPatch(types.MergePatchType, patch)), "labelling the operator")
}

// change changes the spec of an object, which must then be reconciled again.
func (d *demo) change(ctx context.Context, t *tallyv1.Tally, say string) error {
	patch := fmt.Appendf(nil, `{"spec": {"say": %q}}`, say)
	return failure.Wrap(d.Patch(ctx, t, client.RawPatch(types.MergePatchType, patch)), "changing Tally %s/%s", t.Namespace, t.Name)
}

// churn changes one object after the other until the context ends, and counts the changes.
func (d *demo) churn(ctx context.Context) (changes int, err error) {
	tallies, err := d.tallies(ctx)
	if err != nil {
		return 0, err
	}
	tick := time.NewTicker(churnEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return changes, nil
		case <-tick.C:
		}
		err := d.change(ctx, &tallies[changes%len(tallies)], fmt.Sprintf("change %d", changes))
		if err != nil && ctx.Err() == nil {
			return changes, err
		}
		changes++
	}
}

// changeAll changes each object once.
func (d *demo) changeAll(ctx context.Context, say string) error {
	tallies, err := d.tallies(ctx)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := range tallies {
		g.Go(func() error { return d.change(ctx, &tallies[i], say) })
	}
	return g.Wait()
}
