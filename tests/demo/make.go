package main

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// ours marks what the demo made, beside the operator itself.
var ours = client.MatchingLabels{"app.kubernetes.io/part-of": "tally-demo"}

// writers is how many requests the demo has in flight while it makes objects.
const writers = 8

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
			return fmt.Errorf("making namespace %s: %w", name, err)
		}
	}
	return nil
}

// makeObjects makes the objects from number first up to end, dealt out to the
// namespaces in turn.
func (d *demo) makeObjects(ctx context.Context, names []string, first, end int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(writers)
	for i := first; i < end; i++ {
		g.Go(func() error {
			t := &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{
				Namespace: names[i%len(names)],
				Name:      fmt.Sprintf("t-%02d", i/len(names)),
			}, Spec: tallyv1.TallySpec{Say: "hello"}}
			if err := d.Create(ctx, t); err != nil {
				return fmt.Errorf("making Tally %s/%s: %w", t.Namespace, t.Name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// makeShards gives each pod a shard with its part of the namespaces, and waits
// until the mesh knows of it: a pod made earlier would be nobody's member.
func (d *demo) makeShards(ctx context.Context, names []string) error {
	for i := range shards {
		c := shard(i, names[i*len(names)/shards:(i+1)*len(names)/shards])
		if err := d.Create(ctx, c); err != nil {
			return fmt.Errorf("making ShardingConfig %s: %w", c.Name, err)
		}
		err := kube.Until(ctx, "the manager to see ShardingConfig "+c.Name, func(ctx context.Context) error {
			if err := d.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
				return err
			}
			if c.Status.ObservedGeneration < c.Generation {
				return fmt.Errorf("generation %d is observed, not yet %d", c.Status.ObservedGeneration, c.Generation)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// shard is the ShardingConfig of one pod of the operator.
func shard(ordinal int, namespaces []string) *meshv1alpha1.ShardingConfig {
	in := func(key string, values ...string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: key, Operator: metav1.LabelSelectorOpIn, Values: values},
		}}
	}
	return &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: operator, Name: fmt.Sprintf("shard-%d", ordinal), Labels: ours},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector:   in("statefulset.kubernetes.io/pod-name", fmt.Sprintf("%s-%d", workload, ordinal)),
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: lock},
			Limits: []meshv1alpha1.ObjectLimiter{{
				RelateResources: []meshv1alpha1.ResourceGroup{
					{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}},
				},
				Selector: in(meshv1alpha1.NamespaceLabel, namespaces...),
			}},
		},
	}
}
