package command

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// trafficTimeout is how long commands about CircuitBreakers and FaultInjections wait by default. Statuses
// are some seconds old.
const trafficTimeout = time.Minute

// traffic changes CircuitBreakers or FaultInjections, and waits until the change takes effect.
type traffic struct {
	progress
	reader snapshot.Reader
	// part reads the objects.
	part    snapshot.Part
	timeout time.Duration
	changed []string
}

// patch applies a merge patch to an object.
func (t *traffic) patch(ctx context.Context, o client.Object, what, patch string) error {
	if err := t.reader.Client.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		return fmt.Errorf("patching %s: %w: you need permission to get and patch it", what, err)
	}
	t.changed = append(t.changed, what)
	t.say("changed", what)
	return nil
}

// outlook is what a change waits for.
type outlook struct {
	waiting []string
	// stuck says why waiting cannot help; empty if it can.
	stuck string
}

// await waits until nothing is left to wait for, and prints how that ended. do is the command that shows
// what is missing.
func (t *traffic) await(ctx context.Context, summary, do string, look func(*snapshot.Snapshot) outlook) error {
	deadline, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	out := report.Change{Changed: append([]string{}, t.changed...), Do: do}
	for {
		s, err := t.reader.ReadAll(ctx, t.part)
		if err == nil {
			is := look(s)
			switch out.Waiting = is.waiting; {
			case is.stuck != "":
				out.Waiting, out.Summary = []string{is.stuck}, "waiting cannot help"
				return t.print(out, true)
			case len(is.waiting) == 0:
				out.Done, out.Summary, out.Do = true, summary, ""
				return t.print(out, false)
			}
		} else if ctx.Err() == nil || out.Waiting == nil {
			out.Waiting = []string{err.Error()}
		}
		t.say("waiting", out.Waiting[0])
		if t.pause(deadline) {
			continue
		}
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted, waiting for this: %s: see %s", out.Waiting[0], do)
		}
		out.Summary = fmt.Sprintf("timed out after %s", t.timeout)
		return t.print(out, true)
	}
}

// scope returns the namespace to read; empty for all.
func scope(all bool, namespace string) string {
	if all {
		return ""
	}
	return namespace
}
