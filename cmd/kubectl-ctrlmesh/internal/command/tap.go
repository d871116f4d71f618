package command

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
)

func (e *environment) tapCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "tap POD", Short: "Show the requests of a pod as they pass its agent", Args: cobra.ExactArgs(1),
		Long:    "Follow the log of the agent on the node of a pod, and print the access lines of that pod. Agents log such lines if the value agent.accessLog of the chart is set.",
		Example: "  kubectl ctrlmesh tap operator-demo-0 --verb update,patch --code 4xx\n  kubectl ctrlmesh tap operator-demo-0 --since 10m -o json",
	}
	var filter tap.Filter
	since := c.Flags().Duration("since", 0, "also print lines of this long ago")
	c.Flags().StringSliceVar(&filter.Verbs, "verb", nil, "verbs such as update")
	c.Flags().StringSliceVar(&filter.Resources, "resource", nil, "resources such as pods, which includes pods/status")
	c.Flags().StringSliceVar(&filter.Codes, "code", nil, "status codes such as 409 or 4xx")
	c.RunE = func(c *cobra.Command, args []string) error {
		if e.output == "yaml" {
			return errors.New("tap prints lines: choose -o table or -o json")
		}
		if err := filter.Check(); err != nil {
			return err
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		filter.Pod = namespace + "/" + args[0]
		t := &tapping{progress: progress{environment: e}, reader: r, namespace: namespace, pod: args[0], filter: filter}
		return t.run(c.Context(), *since)
	}
	return c
}

// tapping follows the access lines of a pod.
type tapping struct {
	progress
	reader         snapshot.Reader
	namespace, pod string
	filter         tap.Filter
	// last is the time of the last line. Lines that are not after resumed were read before.
	last, resumed time.Time
}

// run prints lines until the context ends. If a log ends, because its agent was replaced, it continues
// with that of the next agent.
func (t *tapping) run(ctx context.Context, since time.Duration) error {
	options := &corev1.PodLogOptions{Follow: true, TailLines: new(int64(0))}
	if since > 0 {
		options = &corev1.PodLogOptions{Follow: true, SinceSeconds: new(int64(max(1, since.Seconds())))}
	}
	for first := true; ; first = false {
		err := t.follow(ctx, options)
		switch {
		case ctx.Err() != nil:
			return nil // as the user wants it
		case err != nil && first:
			return err
		case err != nil && err.Error() != t.said:
			t.said = err.Error()
			fmt.Fprintf(t.ErrOut, "waiting for a log: %v\n", err)
		}
		t.resumed = t.last
		from := t.last
		if from.IsZero() {
			from = t.reader.Now()
		}
		options = &corev1.PodLogOptions{Follow: true, SinceTime: new(metav1.NewTime(from))}
		if !t.pause(ctx) {
			return nil
		}
	}
}

// follow prints lines until the log of the current agent ends.
func (t *tapping) follow(ctx context.Context, options *corev1.PodLogOptions) error {
	s, err := t.reader.ReadAll(ctx, snapshot.Programs, snapshot.Members(t.namespace))
	if err != nil {
		return err
	}
	agent, err := tap.Agent(s, t.namespace, t.pod)
	if err != nil {
		return err
	}
	log, err := answer.Log(ctx, t.reader, agent, options)
	if err != nil {
		return err
	}
	defer log.Close()
	return tap.Lines(log, t.print)
}

// print prints a line of a log that the filter selects, unless it is one of those that were read before.
func (t *tapping) print(text []byte) error {
	line, ok := tap.Parse(text)
	if !ok || !line.Time.After(t.resumed) {
		return nil
	}
	if line.Time.After(t.last) {
		t.last = line.Time
	}
	if !t.filter.Selects(line) {
		return nil
	}
	out := line.String()
	if t.output == "json" {
		raw, err := tap.Raw(text)
		if err != nil {
			return nil // it was parsed before
		}
		out = raw
	}
	_, err := fmt.Fprintln(t.Out, out)
	return err
}
