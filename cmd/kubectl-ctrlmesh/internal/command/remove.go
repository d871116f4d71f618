package command

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

func (e *environment) removeCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "remove KIND/NAME | remove ROOT", Short: "Remove an operator from the mesh, step by step", Args: cobra.ExactArgs(1),
		Long:    "Remove the operator of a root from the mesh: delete its ShardingConfig, wait until the locks are released, remove the label from its pod template, and wait until no pod has it. Run again, it goes on where it was.",
		Example: "  kubectl ctrlmesh remove statefulset/operator-demo --dry-run\n  kubectl ctrlmesh remove operator-demo",
	}
	dryRun := c.Flags().Bool("dry-run", false, "change nothing, and print the commands that do the same")
	timeout := c.Flags().Duration("timeout", walkTimeout, "how long to wait")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, namespace string, args []string) error {
		request, err := removal(ctx, r, namespace, args[0])
		if err != nil {
			return err
		}
		w := &walk{
			progress: progress{environment: e}, reader: r, request: request, next: adoption.Remove, timeout: *timeout,
			// The root may be gone by then.
			again: fmt.Sprintf("kubectl ctrlmesh remove %s/%s -n %s", strings.ToLower(request.Target.Kind), request.Target.Name, namespace),
		}
		return w.remove(ctx, *dryRun)
	})
	return c
}

// removal returns the request of a command line, which names a workload or a root.
func removal(ctx context.Context, r snapshot.Reader, namespace, argument string) (adoption.Request, error) {
	if strings.Contains(argument, "/") {
		target, err := adoption.ParseTarget(argument)
		return adoption.Request{Namespace: namespace, Target: target}, err
	}
	s, err := r.ReadAll(ctx, snapshot.Configs(namespace))
	if err != nil {
		return adoption.Request{}, err
	}
	return adoption.Named(s, namespace, argument)
}

// remove takes the steps of a removal, if nothing forbids it.
func (w *walk) remove(ctx context.Context, dryRun bool) error {
	s, err := w.read(ctx)
	if err != nil {
		return err
	}
	if err := adoption.Removable(s, w.request); err != nil {
		return err
	}
	problems, err := w.tries(ctx, s, adoption.Removals(s, w.request))
	if err != nil {
		return err
	}
	if len(problems) > 0 {
		return w.refused(problems)
	}
	if dryRun {
		return w.print(adoption.RemoveScript(s, w.request), false)
	}
	result, _, err := w.run(ctx)
	if err != nil {
		return err
	}
	if result.Done {
		result.Summary = fmt.Sprintf("%s is not on the mesh: no ShardingConfig targets it, and none of its pods has the label", w.request.Target)
	}
	return w.print(result, !result.Done)
}
