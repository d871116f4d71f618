package command

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/check"
)

func (e *environment) upgradeCommand() *cobra.Command {
	group := &cobra.Command{Use: "upgrade", Short: "Prepare an upgrade of the mesh"}
	group.AddCommand(&cobra.Command{
		Use: "check", Short: "Find what hinders an upgrade to the version of this program", Args: cobra.NoArgs,
		Long: "Find what hinders an upgrade of the mesh to the version of this program: use the plugin of the new release. Nothing is changed.\n\nExit codes: 0 the mesh can be upgraded, 1 findings, 2 unknown.",
		RunE: func(c *cobra.Command, _ []string) error {
			r, _, err := e.connect()
			if err != nil {
				return err
			}
			s, err := r.Read(c.Context(), check.UpgradeParts()...)
			if err != nil {
				return fmt.Errorf("%w: check the connection to the apiserver", err)
			}
			result, err := check.RunUpgrade(c.Context(), s, e.version)
			if err != nil {
				return err
			}
			return e.checked(result)
		},
	})
	return group
}
