package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

func (e *environment) faultsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "faults", Short: "Show which faults are injected, and stop them", Args: cobra.NoArgs,
		Example: "  kubectl ctrlmesh faults -A\n  kubectl ctrlmesh faults stop canary-conflicts -n operator-demo\n  kubectl ctrlmesh faults stop --all -A",
	}
	everywhere := c.PersistentFlags().BoolP("all-namespaces", "A", false, "in all namespaces")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, namespace string, _ []string) error {
		s, err := r.ReadAll(ctx, snapshot.Faults(scope(*everywhere, namespace)))
		if err != nil {
			return err
		}
		faults := report.FaultsOf(s)
		return e.print(faults, faults.Findings())
	})
	c.AddCommand(e.stopCommand(everywhere))
	return c
}

func (e *environment) stopCommand(everywhere *bool) *cobra.Command {
	c := &cobra.Command{Use: "stop NAME | stop --all", Short: "Disable FaultInjections, and wait until no fault is in force", Args: cobra.MaximumNArgs(1)}
	all := c.Flags().Bool("all", false, "all FaultInjections in force in the namespace, or with -A in all namespaces")
	timeout := c.Flags().Duration("timeout", trafficTimeout, "how long to wait")
	c.RunE = func(c *cobra.Command, args []string) error {
		if *all == (len(args) > 0) {
			return errors.New("name one FaultInjection, or all by --all")
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		t := &traffic{progress: progress{environment: e}, reader: r, part: snapshot.Faults(scope(*everywhere, namespace)), timeout: *timeout}
		name := ""
		if len(args) > 0 {
			name, t.part = args[0], snapshot.Faults(namespace)
		}
		return t.stop(c.Context(), namespace, name)
	}
	return c
}

// stop disables the FaultInjection of a name, or all that may be in force if it is empty.
func (t *traffic) stop(ctx context.Context, namespace, name string) error {
	s, err := t.reader.ReadAll(ctx, t.part)
	if err != nil {
		return err
	}
	var stopped []string
	for _, f := range s.Subjects.Faults {
		if name == "" && report.Active(f.Status.Conditions) == "" || name != "" && f.Name != name {
			continue
		}
		stopped = append(stopped, f.Namespace+"/"+f.Name)
		if _, disabled := f.Labels[v1alpha1.DisableFaultsLabel]; disabled {
			continue
		}
		o := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{Namespace: f.Namespace, Name: f.Name}}
		if err := t.patch(ctx, o, "FaultInjection "+f.Namespace+"/"+f.Name, fmt.Sprintf(`{"metadata":{"labels":{%q:"true"}}}`, v1alpha1.DisableFaultsLabel)); err != nil {
			return err
		}
	}
	if name != "" && len(stopped) == 0 {
		return fmt.Errorf("there is no FaultInjection %s in namespace %s: name another namespace by -n, or see kubectl ctrlmesh faults -A", name, namespace)
	}
	slices.Sort(stopped)
	summary := "no fault is in force in a pod"
	if len(stopped) > 0 {
		summary = "no fault is in force in a pod; disabled: " + strings.Join(stopped, ", ")
	}
	return t.await(ctx, summary, "kubectl ctrlmesh faults -A", func(s *snapshot.Snapshot) (out outlook) {
		for _, f := range s.Subjects.Faults {
			id := f.Namespace + "/" + f.Name
			if !slices.Contains(stopped, id) {
				continue
			}
			if why := report.Active(f.Status.Conditions); why != "" {
				out.waiting = append(out.waiting, fmt.Sprintf("FaultInjection %s: %s", id, why))
			}
		}
		return out
	})
}
