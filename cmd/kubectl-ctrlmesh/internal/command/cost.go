package command

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/cost"
)

func (e *environment) costCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "cost", Short: "Show what operators cost the apiserver", Args: cobra.NoArgs,
		Long:    "Show what the operators on the mesh cost the apiserver, by shard and by resource: requests, writes, conflicts, bytes and watches. Agents count this; the command reads their metrics twice.",
		Example: "  kubectl ctrlmesh cost -n operator-demo\n  kubectl ctrlmesh cost -A --for 1m",
	}
	all := c.Flags().BoolP("all-namespaces", "A", false, "show the operators in all namespaces")
	during := c.Flags().Duration("for", 10*time.Second, "how long to measure")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if *during <= 0 {
			return errors.New("--for must be positive")
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		namespace = scope(*all, namespace)
		before, err := answer.ReadCosts(c.Context(), r, namespace)
		if err != nil {
			return err
		}
		if len(before.Agents) > 0 {
			fmt.Fprintf(e.ErrOut, "measuring for %s\n", *during)
			if !sleep(c.Context(), *during) {
				return c.Context().Err()
			}
		}
		after, err := answer.ReadCosts(c.Context(), r, namespace)
		if err != nil {
			return err
		}
		return e.print(cost.Between(before, after, namespace), false)
	}
	return c
}
