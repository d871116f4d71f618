package capture

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// cleanup uninstalls the mesh by the commands of docs/operations.md, while there are members and a
// root, and looks for remnants: on the nodes, in the members' network namespaces, and in the
// cluster.
func (s *suite) cleanup(ctx context.Context) (err error) {
	if err := s.startFleet(ctx); err != nil {
		return err
	}
	inventories := map[string]string{}
	for _, node := range s.Nodes {
		if inventories[node], err = s.onNode(ctx, node, "inventory", pinDir); err != nil {
			return err
		}
	}
	if err := s.checkTracesFound(ctx); err != nil {
		return err
	}
	if err := s.createRoot(ctx, s.fleet.Members[0].Namespace); err != nil {
		return err
	}
	uninstall := exec.CommandContext(ctx, filepath.Join(s.Root, "hack", "uninstall.sh"))
	if out, err := uninstall.CombinedOutput(); err != nil {
		return fmt.Errorf("hack/uninstall.sh: %w: %s", err, out)
	}
	s.Logf("  uninstalled")

	var left []string
	err = s.Until(ctx, "nothing to be left", func(ctx context.Context) error {
		left = nil
		for _, find := range []func(context.Context, map[string]string) ([]string, error){s.leftOnNodes, s.leftInPods, s.leftInCluster} {
			found, err := find(ctx, inventories)
			left = append(left, found...)
			if err != nil {
				return err
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("%d things are: %s, for one", len(left), left[0])
		}
		return nil
	})
	if err == nil || len(left) > 0 {
		s.counts.left = append([]string{}, left...)
		return nil // counted
	}
	return err
}

// checkTracesFound proves that traces of the mesh are found while it is installed.
func (s *suite) checkTracesFound(ctx context.Context) error {
	for _, m := range s.fleet.Members {
		if m.Mode == "address" {
			continue
		}
		found, err := s.inPod(ctx, m)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("%s is captured, and nothing of it is in its network", m.Name)
		}
	}
	return nil
}

// createRoot creates a root, and waits until it cannot be deleted without the manager.
func (s *suite) createRoot(ctx context.Context, home string) error {
	root := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "kept"},
		Spec: meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
			Prefix: "kept", TargetStatefulSet: "kept",
			Auto:             &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
			ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"secrets"}}}}},
		}},
	}
	if err := s.CreateAll(ctx, root); err != nil {
		return err
	}
	return s.UntilObject(ctx, "the root to be the manager's", root, func() error {
		if !controllerutil.ContainsFinalizer(root, meshv1alpha1.HandoverFinalizer) {
			return errors.New("it has no finalizer")
		}
		return nil
	})
}
