package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kridgev1alpha1 "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruisev1alpha1 "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/reviews"
)

// cluster is the cluster under test, as its administrator sees it.
var cluster *kube.Cluster

func TestMain(m *testing.M) {
	if err := setUp(); err != nil {
		fmt.Fprintf(os.Stderr, "e2e: %v\n`make e2e` starts a cluster, installs ctrlmesh and runs these tests.\n", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func setUp() (err error) {
	if cluster, err = kube.Connect(tallyv1.AddToScheme, kridgev1alpha1.AddToScheme, kruisev1alpha1.AddToScheme, reviews.AddToScheme); err != nil {
		return err
	}
	ctx := context.Background()
	for _, w := range []client.Object{manager(), agent()} {
		err := kube.UntilWithin(ctx, patience, "ctrlmesh to be ready", func(ctx context.Context) error {
			err := cluster.RolledOut(ctx, w)
			if client.IgnoreNotFound(err) == nil && err != nil {
				return kube.Never(errors.New("ctrlmesh is not installed"))
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := sweep(ctx); err != nil {
		return err
	}
	// The operator tally's kind, and the rights to it. Admission by policies knows a new kind only after a while.
	for _, file := range []string{"crd.yaml", "clusterroles.yaml"} {
		if err := cluster.ApplyPath(ctx, "tests/operators/tally/deploy/"+file); err != nil {
			return err
		}
	}
	return nil
}

// sweep deletes the namespaces of an interrupted run, without waiting, and those of make
// demo, whose operator would reconcile objects of these tests, too.
func sweep(ctx context.Context) error {
	var left, demo corev1.NamespaceList
	if err := errors.Join(cluster.List(ctx, &left, ours), cluster.List(ctx, &demo, demos)); err != nil {
		return fmt.Errorf("listing namespaces of an earlier run: %w", err)
	}
	for _, ns := range demo.Items {
		if err := cluster.DeleteAllOf(ctx, &tallyv1.Tally{}, client.InNamespace(ns.Name)); err != nil && !meta.IsNoMatchError(err) {
			return fmt.Errorf("deleting objects of the demo: %w", err)
		}
	}
	left.Items = append(left.Items, demo.Items...)
	left.Items = append(left.Items, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: demoOperator}})
	for i := range left.Items {
		if err := cluster.Delete(ctx, &left.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting a namespace of an earlier run: %w", err)
		}
	}
	return kube.UntilWithin(ctx, patience, "the demo's operator to end", func(ctx context.Context) error {
		var pods corev1.PodList
		if err := cluster.List(ctx, &pods, client.InNamespace(demoOperator)); err != nil {
			return err
		}
		if n := len(pods.Items); n > 0 {
			return fmt.Errorf("it has %d pods", n)
		}
		return nil
	})
}

// patience is how long to wait for a condition that takes seconds on an idle machine. Tests
// that pass do not wait longer on a busy machine than it needs, so patience is no measure of
// the product.
const patience = 4 * time.Minute

// ours marks the namespaces that tests create.
var ours = client.MatchingLabels{"app.kubernetes.io/part-of": "ctrlmesh-e2e"}

// demos marks the namespaces in which make demo has objects; its operator runs in demoOperator.
var demos = client.MatchingLabels{"app.kubernetes.io/part-of": "tally-demo"}

const demoOperator = "operator-demo"

func manager() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.ManagerName}}
}

func agent() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.AgentName}}
}
