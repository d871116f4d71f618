package command

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

func (e *environment) breakerCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "breaker [NAME]", Aliases: []string{"breakers"}, Short: "Show open breakers, close them, and disable CircuitBreakers", Args: cobra.MaximumNArgs(1),
		Example: "  kubectl ctrlmesh breaker -A\n  kubectl ctrlmesh breaker close deletes\n  kubectl ctrlmesh breaker disable deletes",
	}
	all := c.Flags().BoolP("all-namespaces", "A", false, "in all namespaces")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, namespace string, args []string) error {
		s, err := r.ReadAll(ctx, snapshot.Breakers(scope(*all, namespace)))
		if err != nil {
			return err
		}
		name := ""
		if len(args) > 0 {
			name = args[0]
		}
		breakers := report.BreakersOf(s, name)
		if name != "" && len(breakers.Breakers) == 0 {
			return noBreaker(namespace, name)
		}
		return e.print(breakers, breakers.Findings())
	})
	c.AddCommand(
		e.breakerChange("close NAME", "Close the open breakers of a CircuitBreaker", (*breaking).close),
		e.breakerChange("disable NAME", "Disable a CircuitBreaker: none of its rules applies", (*breaking).disable),
		e.breakerChange("enable NAME", "Enable a CircuitBreaker that was disabled by its label", (*breaking).enable),
	)
	return c
}

func noBreaker(namespace, name string) error {
	return fmt.Errorf("there is no CircuitBreaker %s in namespace %s: name another namespace by -n, or see kubectl ctrlmesh breaker -A", name, namespace)
}

// breakerChange returns a command that changes a CircuitBreaker.
func (e *environment) breakerChange(use, short string, change func(*breaking, context.Context, *v1alpha1.CircuitBreaker) error) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: cobra.ExactArgs(1)}
	timeout := c.Flags().Duration("timeout", trafficTimeout, "how long to wait")
	c.RunE = e.connected(func(ctx context.Context, r snapshot.Reader, namespace string, args []string) error {
		b := &breaking{namespace: namespace, name: args[0]}
		b.traffic = traffic{progress: progress{environment: e}, reader: r, part: snapshot.Breakers(namespace), timeout: *timeout}
		s, err := r.ReadAll(ctx, b.part)
		if err != nil {
			return err
		}
		is := b.of(s)
		if is == nil {
			return noBreaker(namespace, args[0])
		}
		return change(b, ctx, is)
	})
	return c
}

// breaking changes one CircuitBreaker.
type breaking struct {
	traffic
	namespace, name string
}

// of returns the CircuitBreaker; nil if it does not exist.
func (b *breaking) of(s *snapshot.Snapshot) *v1alpha1.CircuitBreaker {
	return collect.Find(s.Subjects.Breakers, func(c v1alpha1.CircuitBreaker) bool { return c.Namespace == b.namespace && c.Name == b.name })
}

// write applies a merge patch.
func (b *breaking) write(ctx context.Context, patch string) error {
	return b.patch(ctx, &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, Name: b.name}}, "CircuitBreaker "+b.namespace+"/"+b.name, patch)
}

// describe is the command that shows why a change has no effect yet.
func (b *breaking) describe() string {
	return fmt.Sprintf("kubectl -n %s describe circuitbreaker %s", b.namespace, b.name)
}

func (b *breaking) close(ctx context.Context, _ *v1alpha1.CircuitBreaker) error {
	if err := b.write(ctx, fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, v1alpha1.RecoverAnnotation, b.reader.Now().UTC().Format(time.RFC3339Nano))); err != nil {
		return err
	}
	summary := fmt.Sprintf("no breaker of CircuitBreaker %s/%s is open", b.namespace, b.name)
	return b.await(ctx, summary, fmt.Sprintf("kubectl ctrlmesh breaker %s -n %s", b.name, b.namespace), b.closing)
}

// closing says which breakers are still open.
func (b *breaking) closing(s *snapshot.Snapshot) (out outlook) {
	is := b.of(s)
	if is == nil {
		return outlook{stuck: noBreaker(b.namespace, b.name).Error()}
	}
	open, _ := report.OpenOf(is, s.Now)
	for _, o := range open {
		if !o.Forced {
			out.waiting = append(out.waiting, fmt.Sprintf("the breaker of rule %s is open in pod %s", o.Rule, o.Pod))
		}
	}
	switch {
	case len(out.waiting) > 0:
	case len(open) > 0:
		out.stuck = fmt.Sprintf("rule %s has triggerPolicy ForceOpened, so no recovery closes it: change the rule, or run kubectl ctrlmesh breaker disable %s -n %s", open[0].Rule, b.name, b.namespace)
	case is.Status.Opened > 0:
		out.waiting = []string{fmt.Sprintf("breakers are open in %d pods that the status does not list", is.Status.Opened)}
	}
	return out
}

func (b *breaking) disable(ctx context.Context, _ *v1alpha1.CircuitBreaker) error {
	if err := b.write(ctx, fmt.Sprintf(`{"metadata":{"labels":{%q:"true"}}}`, v1alpha1.DisableBreakerLabel)); err != nil {
		return err
	}
	return b.await(ctx, fmt.Sprintf("CircuitBreaker %s/%s is disabled: none of its rules applies to a pod", b.namespace, b.name), b.describe(), b.until(report.Active))
}

func (b *breaking) enable(ctx context.Context, is *v1alpha1.CircuitBreaker) error {
	if is.Spec.Disabled {
		return fmt.Errorf("CircuitBreaker %s/%s has spec.disabled: true: set it to false where the object is defined", b.namespace, b.name)
	}
	if err := b.write(ctx, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, v1alpha1.DisableBreakerLabel)); err != nil {
		return err
	}
	return b.await(ctx, fmt.Sprintf("CircuitBreaker %s/%s is enabled", b.namespace, b.name), b.describe(), b.until(report.NotInForce))
}

// until waits until a function of the conditions returns no reason to wait.
func (b *breaking) until(why func([]metav1.Condition) string) func(*snapshot.Snapshot) outlook {
	return func(s *snapshot.Snapshot) outlook {
		is := b.of(s)
		if is == nil {
			return outlook{stuck: noBreaker(b.namespace, b.name).Error()}
		}
		if text := why(is.Status.Conditions); text != "" {
			return outlook{waiting: []string{text}}
		}
		return outlook{}
	}
}
