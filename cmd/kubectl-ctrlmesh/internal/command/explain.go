package command

import (
	"errors"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
)

func (e *environment) explainCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "explain POD [VERB RESOURCE[/SUBRESOURCE] [NAME]]", Short: "Show what the mesh does with the requests of a pod, or with one of them", Args: cobra.RangeArgs(1, 4),
		Long:    "Show what the mesh does with the requests of a pod. With a verb and a resource, show what it does with one request that the pod would send now, and which rule decides. The policy of the pod is compiled from the objects in force as the manager does, and evaluated as the agent does. Nothing is sent.\n\nExit codes: 0 the request passes, 1 it is refused, limited or may get a fault, 2 unknown.",
		Example: "  kubectl ctrlmesh explain operator-demo-0\n  kubectl ctrlmesh explain operator-demo-0 update foos.example.com --object-namespace team-42\n  kubectl ctrlmesh explain operator-demo-0 list foos -A\n  kubectl ctrlmesh explain operator-demo-0 update leases operator-leader",
	}
	var q answer.Request
	c.Flags().BoolVarP(&q.All, "all-namespaces", "A", false, "the request is for the objects of all namespaces")
	c.Flags().StringVar(&q.Namespace, "object-namespace", "", "namespace of the object; that of the pod by default")
	c.Flags().StringVar(&q.Cluster, "cluster", "", "name of the member cluster that the request goes to")
	c.Flags().StringVar(&q.UserAgent, "user-agent", "", "User-Agent of the client")
	c.MarkFlagsMutuallyExclusive("all-namespaces", "object-namespace")
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 2 {
			return errors.New("name a resource, too: explain POD VERB RESOURCE")
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		q.Pod = types.NamespacedName{Namespace: namespace, Name: args[0]}
		if len(args) == 1 {
			pod, err := answer.AboutPod(c.Context(), r, q.Pod)
			if err != nil {
				return err
			}
			policy, err := pod.Policy()
			if err != nil {
				return err
			}
			return e.print(policy, false)
		}
		if q.Verb, q.Target = args[1], args[2]; len(args) > 3 {
			q.Object = args[3]
		}
		verdict, err := answer.Explain(c.Context(), r, q)
		if err != nil {
			return err
		}
		return e.print(verdict, verdict.Findings())
	}
	return c
}
