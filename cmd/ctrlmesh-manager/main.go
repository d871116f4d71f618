// Command ctrlmesh-manager is the control plane of the mesh.
//
//	ctrlmesh-manager [flags]                run
//	ctrlmesh-manager check-removal [flags]  fail while the removal of the mesh would break pods
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/internal/program"
	"github.com/ctrlmesh/ctrlmesh/manager"
	"github.com/ctrlmesh/ctrlmesh/manager/removal"
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
	c.AddCommand(checkRemoval())
	program.Main(c)
}

func checkRemoval() *cobra.Command {
	c := &cobra.Command{Use: "check-removal", Short: "Fail while the removal of the mesh would break pods", Args: cobra.NoArgs}
	namespace := c.Flags().String("namespace", os.Getenv("POD_NAMESPACE"), "namespace of the mesh (default $POD_NAMESPACE)")
	rollback := c.Flags().String("rollback", "", "helm's command that readies the release for an upgrade after a refusal, which prints it")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if *namespace == "" {
			return errors.New("no namespace: set --namespace or POD_NAMESPACE")
		}
		config, err := ctrl.GetConfig()
		if err != nil {
			return failure.Wrap(err, "finding the apiserver")
		}
		reader, err := client.New(config, client.Options{})
		if err != nil {
			return failure.Wrap(err, "making the apiserver client")
		}
		err = removal.Check(c.Context(), reader, *namespace)
		if err != nil && *rollback != "" {
			return fmt.Errorf("%w\nhelm now takes the release for half removed: before you upgrade it, run %s", err, *rollback)
		}
		return err
	}
	return c
}
