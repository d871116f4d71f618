package trial

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// The two sets of namespaces of a trial.
const (
	referenceSet = "reference"
	adoptedSet   = "adopted"
)

// words begin the namespaces' names. They differ in their first characters, so that their hashes,
// by which shards are cut, lie far apart.
var words = []string{"amber", "birch", "coral", "dune", "ember", "fjord", "grove", "heath"}

func tenantsOf(set string) (names []string) {
	for _, word := range words {
		names = append(names, word+"-"+set)
	}
	return names
}

// seed creates the namespaces of a set and applies the operator's workload in each.
func (t *trial) seed(ctx context.Context, set string) error {
	for _, name := range tenantsOf(set) {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{trialMark: t.Name}}}
		if err := t.Create(ctx, ns); err != nil {
			return fmt.Errorf("creating a namespace of the workload: %w", err)
		}
		if err := t.applyIn(ctx, name, "workload.yaml"); err != nil {
			return err
		}
	}
	return nil
}

// removeNamespaces deletes namespaces and waits until they are deleted.
func removeNamespaces(ctx context.Context, c *kube.Cluster, names ...string) error {
	for _, name := range names {
		err := c.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing namespace %s: %w", name, err)
		}
	}
	return kube.UntilWithin(ctx, 2*time.Minute, "the namespaces to be removed", func(ctx context.Context) error {
		var list corev1.NamespaceList
		if err := c.List(ctx, &list); err != nil {
			return err
		}
		for _, ns := range list.Items {
			if slices.Contains(names, ns.Name) {
				return fmt.Errorf("%s is left: %s", ns.Name, lastCondition(&ns))
			}
		}
		return nil
	})
}

func lastCondition(ns *corev1.Namespace) string {
	for _, cond := range slices.Backward(ns.Status.Conditions) {
		if cond.Status == corev1.ConditionTrue {
			return cond.Message
		}
	}
	return "no reason is given"
}
