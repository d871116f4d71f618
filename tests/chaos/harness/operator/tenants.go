package operator

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

const (
	// FirstTenant is the first of the default tenants.
	FirstTenant = "chaos-tenant-00"

	defaultTenants = 60 // namespaces with objects
	heavyEvery     = 6  // one tenant in so many has heavyObjects objects, the others have one
	heavyObjects   = 3

	// classLabel separates the objects of operators that run at the same time.
	classLabel = "class"
)

// Tenants are namespaces with the objects that an operator reconciles.
type Tenants struct {
	*harness.Testbed
	Names []string
	Class string // the label value of the objects; empty if there is one operator
}

// labels returns the labels of the objects, or nil if Class is empty.
func (t *Tenants) labels() client.MatchingLabels {
	if t.Class == "" {
		return nil
	}
	return client.MatchingLabels{classLabel: t.Class}
}

// create creates the default tenants, once in a run.
func (t *Tenants) create(ctx context.Context) error {
	if t.Names != nil {
		return nil
	}
	if err := t.removeForeign(ctx); err != nil {
		return err
	}
	return t.Add(ctx, "chaos-tenant-%02d", defaultTenants)
}

// Add creates n namespaces with objects. format has a verb for a number.
func (t *Tenants) Add(ctx context.Context, format string, n int) error {
	for i := range n {
		name := fmt.Sprintf(format, i)
		if err := t.CreateAll(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: harness.Labels}}); err != nil {
			return err
		}
		objects := 1
		if i%heavyEvery == 0 {
			objects = heavyObjects
		}
		if err := t.AddObjects(ctx, name, objects); err != nil {
			return err
		}
		t.Names = append(t.Names, name)
	}
	return nil
}

// removeForeign deletes the objects that something else left, such as make demo. They would
// fill the operator's queue and count in the balance of its shards.
func (t *Tenants) removeForeign(ctx context.Context) error {
	return t.Until(ctx, "the objects of others to be removed", func(ctx context.Context) error {
		var left tallyv1.TallyList
		if err := t.List(ctx, &left); err != nil {
			return err
		}
		if len(left.Items) == 0 {
			return nil
		}
		t.Logf("  removing %d objects that something else left", len(left.Items))
		cleared := map[string]bool{}
		for _, object := range left.Items {
			if cleared[object.Namespace] {
				continue
			}
			if err := t.DeleteAllOf(ctx, &tallyv1.Tally{}, client.InNamespace(object.Namespace)); err != nil {
				return fmt.Errorf("removing the objects in %s: %w", object.Namespace, err)
			}
			cleared[object.Namespace] = true
		}
		return fmt.Errorf("there were %d", len(left.Items))
	})
}

// AddObjects creates n objects in a namespace.
func (t *Tenants) AddObjects(ctx context.Context, namespace string, n int) error {
	for range n {
		if err := t.CreateAll(ctx, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "t-", Labels: t.labels()}}); err != nil {
			return err
		}
	}
	return nil
}
