package command

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/advise"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
)

func (e *environment) adviseCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "advise KIND/NAME", Short: "Say whether an operator can be divided, by its requests", Args: cobra.ExactArgs(1),
		Long:    "Say whether the operator of a StatefulSet or a Deployment can be divided, which resources its shards would divide, and what to know before. The pods must be on the mesh, without a ShardingConfig or with one that has dryRun: true. What they request is then recorded in ConfigMap ctrlmesh-usage of their namespace, about once a minute. With --since or --for, the access lines in the logs of agents are read instead, which agents log if the value agent.accessLog of the chart is set.\n\nExit codes: 0 it can be divided by namespace, 1 it cannot or should not, 2 unknown.",
		Example: "  kubectl ctrlmesh advise statefulset/operator-demo\n  kubectl ctrlmesh advise deployment/operator-demo --for 10m",
	}
	since := c.Flags().Duration("since", 0, "read logs, this far back, as far as the kubelet has them")
	during := c.Flags().Duration("for", 0, "read logs, and follow them for this long")
	c.RunE = func(c *cobra.Command, args []string) error {
		target, err := adoption.ParseTarget(args[0])
		if err != nil {
			return err
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		advice, err := answer.Adviser{
			Reader: r, Namespace: namespace, Workload: target, Since: *since,
			During: *during, Watching: func() { fmt.Fprintf(e.ErrOut, "watching for %s\n", *during) },
		}.Advise(c.Context())
		if err != nil {
			return err
		}
		if err := e.print(advice, advice.Findings() && advice.Verdict != advise.Unseen); err != nil {
			return err
		}
		if advice.Verdict == advise.Unseen {
			return errors.New("too little was seen of the operator")
		}
		return nil
	}
	return c
}
