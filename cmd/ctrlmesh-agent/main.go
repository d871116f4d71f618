// Command ctrlmesh-agent is the mesh on one node.
//
//	ctrlmesh-agent [flags]          run
//	ctrlmesh-agent cleanup [flags]  remove every redirection from this node
package main

import (
	"errors"
	"fmt"
	_ "time/tzdata" // of fault rules; the image has no zones

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/ctrlmesh/ctrlmesh/agent"
	"github.com/ctrlmesh/ctrlmesh/agent/kube"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	"github.com/ctrlmesh/ctrlmesh/internal/program"
)

func main() {
	o := agent.Options{Version: program.Version()}
	c := &cobra.Command{Use: "ctrlmesh-agent", Short: "The mesh on one node", Args: cobra.NoArgs}
	level := program.LogLevel(c.PersistentFlags())
	o.AddFlags(c.PersistentFlags())
	c.PersistentPreRun = func(*cobra.Command, []string) { o.Logger = program.NewLogger(*level) }
	c.RunE = func(c *cobra.Command, _ []string) (err error) {
		if o.Node == "" {
			return errors.New("--node is empty: set it, or NODE_NAME, to the name of this node")
		}
		if o.Client, err = newClient(); err != nil {
			return err
		}
		return agent.Run(c.Context(), o)
	}
	c.AddCommand(cleanup(&o))
	program.Main(c)
}

func cleanup(o *agent.Options) *cobra.Command {
	c := &cobra.Command{Use: "cleanup", Short: "Remove every redirection from this node", Args: cobra.NoArgs}
	wait := c.Flags().Bool("wait", false, "once clean, answer readiness probes until stopped: for a DaemonSet")
	c.RunE = func(c *cobra.Command, _ []string) error {
		return agent.Cleanup(c.Context(), *o, func() error {
			if !*wait {
				return nil
			}
			return telemetry.ServeReady(c.Context(), o.ListenAddress)
		})
	}
	return c
}

func newClient() (*kube.Client, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, fmt.Errorf("finding the apiserver: %w", err)
	}
	config.UserAgent = "ctrlmesh-agent/" + program.Version()
	config.ContentType = "application/vnd.kubernetes.protobuf"
	return kube.New(config)
}
