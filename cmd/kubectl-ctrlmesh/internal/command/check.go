package command

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/check"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

func (e *environment) checkCommand() *cobra.Command {
	c := &cobra.Command{Use: "check", Short: "Find what is wrong with the mesh and the operators on it", Args: cobra.NoArgs}
	pre := c.Flags().Bool("pre", false, "check the cluster before the installation instead")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, _ string, _ []string) error {
		parts, run := check.Parts(), check.Run
		if *pre {
			parts, run = check.PreParts(r.Namespace), check.RunPre
		}
		s, err := r.Read(ctx, parts...)
		if err != nil {
			return fmt.Errorf("%w: check the connection to the apiserver", err)
		}
		return e.checked(run(s))
	})
	return c
}

// checked prints the result of a check.
func (e *environment) checked(result check.Report) error {
	if err := e.print(result, result.Count(check.Error)+result.Count(check.Warning) > 0); err != nil {
		return err
	}
	if n := result.Count(check.Unknown); n > 0 {
		return fmt.Errorf("some parts could not be checked (%d): see the findings of severity %s", n, check.Unknown)
	}
	return nil
}
