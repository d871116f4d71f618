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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
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
	if cluster, err = kube.Connect(tallyv1.AddToScheme); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, w := range []client.Object{manager(), agent()} {
		err := kube.Until(ctx, "ctrlmesh to be ready", func(ctx context.Context) error {
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
	return sweep(ctx)
}

// sweep removes what an interrupted run left, and does not wait for its end.
func sweep(ctx context.Context) error {
	var left corev1.NamespaceList
	if err := cluster.List(ctx, &left, ours); err != nil {
		return fmt.Errorf("looking for namespaces of an earlier run: %w", err)
	}
	for i := range left.Items {
		if err := cluster.Delete(ctx, &left.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing what an earlier run left: %w", err)
		}
	}
	return nil
}

// patience is how long to wait for what takes seconds on an idle machine.
const patience = 90 * time.Second

// ours marks the namespaces that tests make.
var ours = client.MatchingLabels{"app.kubernetes.io/part-of": "ctrlmesh-e2e"}

func manager() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.ManagerName}}
}

func agent() *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: kube.AgentName}}
}
