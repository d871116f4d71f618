package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/explain"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

func (e *environment) explainCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "explain POD VERB RESOURCE[/SUBRESOURCE] [NAME]", Short: "Show what the mesh does with a request of a pod, and which rule decides", Args: cobra.RangeArgs(3, 4),
		Long:    "Show what the mesh does with a request that a pod would send now, and which rule decides. The policy of the pod is compiled from the objects in force as the manager does, and evaluated as the agent does. Nothing is sent.\n\nExit codes: 0 the request passes, 1 it is refused, limited or may get a fault, 2 unknown.",
		Example: "  kubectl ctrlmesh explain operator-demo-0 update foos.example.com --object-namespace team-42\n  kubectl ctrlmesh explain operator-demo-0 list foos -A\n  kubectl ctrlmesh explain operator-demo-0 update leases operator-leader",
	}
	var q explain.Request
	all := c.Flags().BoolP("all-namespaces", "A", false, "the request is for the objects of all namespaces")
	c.Flags().StringVar(&q.Namespace, "object-namespace", "", "namespace of the object; that of the pod by default")
	c.Flags().StringVar(&q.Cluster, "cluster", "", "name of the member cluster that the request goes to")
	c.Flags().StringVar(&q.UserAgent, "user-agent", "", "User-Agent of the client")
	c.MarkFlagsMutuallyExclusive("all-namespaces", "object-namespace")
	c.RunE = func(c *cobra.Command, args []string) error {
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		q.Pod, q.Verb = types.NamespacedName{Namespace: namespace, Name: args[0]}, args[1]
		if err := find(r, &q, args[2:], *all); err != nil {
			return err
		}
		verdict, err := explained(c.Context(), r, &q)
		if err != nil {
			return err
		}
		return e.print(verdict, verdict.Findings())
	}
	return c
}

// find fills in what the request is about.
func find(r snapshot.Reader, q *explain.Request, args []string, all bool) error {
	lists, failed, err := r.Served()
	if err != nil {
		return err
	}
	var named string
	if q.Resource, named, err = explain.Find(lists, args[0]); err != nil {
		return errors.Join(err, failed)
	}
	if len(args) > 1 {
		if has := explain.Subresources(lists, q.Resource); named != "" {
			return fmt.Errorf("%s has no subresource %s: it has %s", q.Resource, named, cmp.Or(strings.Join(has, ", "), "none"))
		}
		named = args[1]
	}
	q.Name = named
	switch {
	case !q.Resource.Namespaced && q.Namespace != "":
		return fmt.Errorf("%s are in no namespace: leave out --object-namespace", q.Resource)
	case q.Resource.Namespaced && !all && q.Namespace == "":
		q.Namespace = q.Pod.Namespace
	}
	return q.Check()
}

// explained reads what the verdict follows from.
func explained(ctx context.Context, r snapshot.Reader, q *explain.Request) (explain.Verdict, error) {
	in := q.Pod.Namespace
	s, err := read(ctx, r, snapshot.Single(in, q.Pod.Name), snapshot.Configs(in), snapshot.Members(in), snapshot.Breakers(in), snapshot.Faults(in), snapshot.TrafficPolicies(in))
	if err != nil {
		return explain.Verdict{}, err
	}
	if s.Subjects.Pod == nil {
		return explain.Verdict{}, fmt.Errorf("there is no pod %s in namespace %s: name another namespace by -n", q.Pod.Name, in)
	}
	more := []snapshot.Part{snapshot.Programs, snapshot.Settings, snapshot.Namespaces}
	if lock.Kind(q.Resource.Group, q.Resource.Name) {
		more = append(more, snapshot.Locks)
	}
	if err := r.Extend(ctx, s, more...); err != nil {
		return explain.Verdict{}, err
	}
	for i := range s.Configs {
		if c := &s.Configs[i]; q.Name != "" && c.Spec.Root != nil && operator.KeyOf(c) == v1alpha1.KeyObject {
			q.UID, q.Unread = r.UIDOf(ctx, q.Resource.GroupVersionKind(), q.Namespace, q.Name)
			break
		}
	}
	if ctx.Err() != nil {
		return explain.Verdict{}, ctx.Err()
	}
	return explain.Of(s, q)
}
