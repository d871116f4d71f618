// Command ctrlmesh-manager is the control plane of the mesh.
package main

import (
	"flag"
	"os"

	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/ctrlmesh/ctrlmesh/internal/program"
	"github.com/ctrlmesh/ctrlmesh/manager"
)

func main() {
	var o manager.Options
	c := &cobra.Command{Use: "ctrlmesh-manager", Short: "The control plane of the mesh", Args: cobra.NoArgs}
	level := program.LogLevel(c.Flags())
	o.AddFlags(c.Flags(), os.Getenv)
	c.Flags().AddGoFlagSet(flag.CommandLine) // controller-runtime's --kubeconfig
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		o.Log = program.NewLogger(*level)
		if o.Config, err = ctrl.GetConfig(); err != nil {
			return err
		}
		o.Log.Info("starting", "version", program.Version())
		return manager.Run(c.Context(), o)
	}
	program.Main(c)
}
