package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// withoutControllers restarts the cluster's own controller manager without the given controllers,
// and returns a function that restores it. The operator on trial runs them instead.
func withoutControllers(ctx context.Context, c *kube.Cluster, controllers []string) (restore func() error, err error) {
	if len(controllers) == 0 {
		return func() error { return nil }, nil
	}
	restore = func() error { return restartControllerManager(context.WithoutCancel(ctx), c, "") }
	args := "--controllers=*,-" + strings.Join(controllers, ",-")
	if err := restartControllerManager(ctx, c, args); err != nil {
		return nil, errors.Join(err, restore())
	}
	return restore, nil
}

func restartControllerManager(ctx context.Context, c *kube.Cluster, args string) error {
	for _, do := range []string{"stop", "start"} {
		cmd := exec.CommandContext(ctx, filepath.Join(c.Root, "tests", "cluster", "node.sh"), do, KubeControllerManager)
		cmd.Env = append(os.Environ(), "CONTROLLER_MANAGER_ARGS="+args)
		if out, err := cmd.CombinedOutput(); err != nil && do == "start" {
			return fmt.Errorf("restarting the cluster's controller manager: %w: %s", err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}
