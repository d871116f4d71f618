package command

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/check"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

func (e *environment) upgradeCommand() *cobra.Command {
	group := &cobra.Command{Use: "upgrade", Short: "Prepare an upgrade of the mesh"}
	group.AddCommand(&cobra.Command{
		Use: "check", Short: "Find what hinders an upgrade to the version of this program", Args: cobra.NoArgs,
		Long: "Find what hinders an upgrade of the mesh to the version of this program: use the plugin of the new release. Nothing is changed.\n\nExit codes: 0 the mesh can be upgraded, 1 findings, 2 unknown.",
		RunE: e.connected(func(ctx context.Context, r snapshot.Reader, _ string, _ []string) error {
			s, err := r.Read(ctx, append(check.Parts(), snapshot.Applied)...)
			if err != nil {
				return fmt.Errorf("%w: check the connection to the apiserver", err)
			}
			result, err := check.RunUpgrade(ctx, s, e.version)
			if err != nil {
				return err
			}
			return e.checked(result)
		}),
	})
	return group
}
