package command

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/migrate"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect"
)

func (e *environment) migrateCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "migrate", Short: "Print the native objects for those of openkruise/controllermesh and Kridge", Args: cobra.NoArgs,
		Long:    "Print native objects that replace VirtualApps, TrafficPolicies and ShardingConfigs of Kridge, of a namespace or of files. Nothing is changed. The standard error has what is left to do by hand.\n\nExit codes: 0 all objects have a native form, 1 some have none, 2 unknown.",
		Example: "  kubectl ctrlmesh migrate -n operator-demo >native.yaml\n  kubectl ctrlmesh migrate -f virtualapp.yaml,trafficpolicy.yaml",
	}
	files := c.Flags().StringSliceP("filename", "f", nil, "files with the objects, which need no cluster; - for the standard input")
	all := c.Flags().BoolP("all-namespaces", "A", false, "print those of all namespaces")
	c.RunE = func(c *cobra.Command, _ []string) error {
		objects, err := e.ofDialects(c.Context(), *files, *all)
		if err != nil {
			return err
		}
		if len(objects) == 0 {
			return fmt.Errorf("there are no objects of openkruise/controllermesh or Kridge: name a namespace by -n, or use -A or -f")
		}
		return e.migrate(objects)
	}
	return c
}

// ofDialects reads objects of dialects from files, or else from the cluster.
func (e *environment) ofDialects(ctx context.Context, files []string, all bool) ([]dialect.Object, error) {
	if len(files) == 0 {
		r, namespace, err := e.connect()
		if err != nil {
			return nil, err
		}
		return migrate.Read(ctx, r.Client, scope(all, namespace))
	}
	var objects []*unstructured.Unstructured
	for _, file := range files {
		some, err := e.objects(file)
		if err != nil {
			return nil, err
		}
		objects = append(objects, some...)
	}
	return migrate.Of(objects, *e.flags.Namespace)
}

// migrate prints the native form of objects, and what is left to do.
func (e *environment) migrate(objects []dialect.Object) error {
	m, refused := dialect.Migrate(objects...)
	if err := migrate.Write(e.Out, m.Objects, e.output == "json"); err != nil {
		return fmt.Errorf("writing the objects: %w", err)
	}
	for _, n := range m.Notes {
		fmt.Fprintf(e.ErrOut, "? %s\n", n)
	}
	if refused == nil {
		return nil
	}
	fmt.Fprintf(e.ErrOut, "! %v\n", refused)
	return errFound
}
