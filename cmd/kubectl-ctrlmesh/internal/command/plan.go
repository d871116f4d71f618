package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/plan"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

func (e *environment) planCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "plan -f FILE", Short: "Show how a ShardingConfig would divide what there is", Args: cobra.NoArgs,
		Long:    "Show how the root of a file would divide the namespaces and objects that there are, which pods would belong to its shards, who holds the operator's locks, and what the manager may not count. Nothing is changed. Objects are counted by the permissions of the user.\n\nExit codes: 0 the shards would work, 1 something is missing, 2 unknown.",
		Example: "  kubectl ctrlmesh plan -f operator-demo.yaml",
	}
	file := c.Flags().StringP("filename", "f", "", "file with a ShardingConfig that has spec.root; - for the standard input")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if *file == "" {
			return errors.New("no file: name one by -f")
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		root, err := e.planned(c.Context(), *file, namespace)
		if err != nil {
			return err
		}
		p, err := planOf(c.Context(), r, root)
		if err != nil {
			return err
		}
		return e.print(p, p.Findings())
	}
	return c
}

// planned reads a root with its defaults, which admission accepts.
func (e *environment) planned(ctx context.Context, file, namespace string) (*v1alpha1.ShardingConfig, error) {
	o, err := e.rootOf(file)
	if err != nil {
		return nil, err
	}
	if o.GetNamespace() == "" {
		o.SetNamespace(namespace)
	}
	root, problems, err := e.admitted(ctx, file, o)
	switch {
	case err != nil:
		return nil, err
	case len(problems) > 0:
		return nil, fmt.Errorf("admission would refuse it: %s: correct it as kubectl ctrlmesh lint says", problems[0])
	case root.Spec.Root == nil:
		return nil, fmt.Errorf("ShardingConfig %s has no spec.root: its spec.limits say what it owns", root.Name)
	}
	return root, nil
}

// planOf reads what a plan follows from.
func planOf(ctx context.Context, r snapshot.Reader, root *v1alpha1.ShardingConfig) (plan.Preview, error) {
	lists, _, err := r.Served()
	if err != nil {
		return plan.Preview{}, err
	}
	resources, problems := plan.Resources(lists, root)
	parts := []snapshot.Part{snapshot.Configs(root.Namespace), snapshot.Namespaces, snapshot.Counts(resources)}
	if target := layout.Target(root.Spec.Root); target.Name != "" {
		parts = append(parts, snapshot.Target(root.Namespace, target))
	}
	s, err := r.ReadAll(ctx, parts...)
	if err != nil {
		return plan.Preview{}, err
	}
	if s.Config(root.Namespace, root.Name) == nil {
		s.Configs = append(s.Configs, *root) // whose locks are read
	}
	if err := r.Extend(ctx, s, snapshot.Locks, snapshot.ManagerLists(resources)); err != nil {
		return plan.Preview{}, err
	}
	return plan.Of(s, root, problems)
}
