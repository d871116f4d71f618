package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// maxRepeats is how often an action is repeated before the command concludes that something reverts it.
const maxRepeats = 3

// settling is what a walk waits for after a change, until it reads the next state.
const settling = "the effect of the last change"

// walk takes the steps of an adoption or a removal: it reads, decides and acts.
type walk struct {
	progress
	reader  snapshot.Reader
	request adoption.Request
	next    func(*snapshot.Snapshot, adoption.Request) adoption.Step
	timeout time.Duration
	// again is the command line that goes on where this one ends.
	again string
	// changed are the actions so far.
	changed []adoption.Action
}

// read reads what steps follow from.
func (w *walk) read(ctx context.Context) (*snapshot.Snapshot, error) {
	in := w.request.Namespace
	s, err := w.reader.ReadAll(ctx, snapshot.Programs, snapshot.Configs(in), snapshot.Members(in), snapshot.Target(in, w.request.Target))
	if err != nil {
		return nil, err
	}
	return s, w.reader.Extend(ctx, s, snapshot.Locks)
}

// allowed returns an error that names the permissions that the user lacks for actions.
func (w *walk) allowed(ctx context.Context, s *snapshot.Snapshot, actions []adoption.Action) error {
	if err := w.reader.Extend(ctx, s, snapshot.Reviews(w.request.Access(actions))); err != nil {
		return err
	}
	if !s.Has(snapshot.Reviews(nil)) {
		return s.Err()
	}
	var lacking []string
	for _, a := range s.Access {
		if !a.Allowed {
			lacking = append(lacking, fmt.Sprintf("%s %s.%s", a.Verb, a.Resource, a.Group))
		}
	}
	if len(lacking) > 0 {
		return fmt.Errorf("you may not %s in namespace %s: ask for the permission", strings.Join(lacking, ", nor "), w.request.Namespace)
	}
	return nil
}

// run takes the steps until nothing is left to do, waiting cannot help, or the time is over. It returns
// the last snapshot, too.
func (w *walk) run(ctx context.Context) (adoption.Result, *snapshot.Snapshot, error) {
	deadline, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	step := adoption.Step{Kind: adoption.Wait, Why: "the state is not known yet"}
	for {
		s, err := w.read(ctx)
		switch {
		case err == nil:
			step = w.next(s, w.request)
		case ctx.Err() == nil:
			step = adoption.Step{Kind: adoption.Wait, Why: err.Error()}
		}
		if step.Kind == adoption.Act {
			if step, err = w.act(ctx, s, step.Action); err != nil {
				return adoption.Result{}, nil, err
			}
		}
		if step.Kind != adoption.Wait {
			return w.result(step), s, nil
		}
		if step.Why != settling {
			w.say("waiting", step.Why)
		}
		if w.pause(deadline) {
			continue
		}
		if ctx.Err() != nil {
			return adoption.Result{}, nil, fmt.Errorf("interrupted, waiting for this: %s: run %s to go on", step.Why, w.again)
		}
		return w.result(step), s, nil
	}
}

// act does one action. It returns the step that follows: usually a Wait, and a Stop if something reverts
// the action again and again.
func (w *walk) act(ctx context.Context, s *snapshot.Snapshot, action adoption.Action) (adoption.Step, error) {
	if collect.Count(w.changed, func(a adoption.Action) bool { return a == action }) == maxRepeats {
		return adoption.Step{Kind: adoption.Stop, Why: "something reverts this change: " + w.describe(action), Do: "make the change where the object is defined, such as in the repository of a GitOps tool"}, nil
	}
	err := w.write(ctx, s, action)
	switch {
	case apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err): // somebody else was faster
		return adoption.Step{Kind: adoption.Wait, Why: err.Error()}, nil
	case err != nil:
		return adoption.Step{}, fmt.Errorf("%s: %w: fix it, then run %s to go on", w.describe(action), err, w.again)
	}
	w.changed = append(w.changed, action)
	w.say("done", w.describe(action))
	return adoption.Step{Kind: adoption.Wait, Why: settling}, nil
}

// write does one action at the apiserver, or tries it there.
func (w *walk) write(ctx context.Context, s *snapshot.Snapshot, action adoption.Action, trial ...string) error {
	switch action {
	case adoption.CreateRoot:
		return w.reader.Client.Create(ctx, w.request.Wanted.DeepCopy(), &client.CreateOptions{DryRun: trial})
	case adoption.DeleteRoot:
		return w.reader.Client.Delete(ctx, w.request.Root(s).DeepCopy(), &client.DeleteOptions{DryRun: trial})
	}
	patch := client.RawPatch(types.MergePatchType, adoption.LabelPatch(action == adoption.SetLabel))
	return w.reader.Client.Patch(ctx, w.object(), patch, &client.PatchOptions{DryRun: trial})
}

// object returns the workload by its name.
func (w *walk) object() client.Object {
	name := metav1.ObjectMeta{Namespace: w.request.Namespace, Name: w.request.Target.Name}
	if w.request.Target.Kind == layout.Deployment {
		return &appsv1.Deployment{ObjectMeta: name}
	}
	return &appsv1.StatefulSet{ObjectMeta: name}
}

// tries returns the problems that the apiserver has with actions, without doing them. It shows the
// warnings of admission. Without a permission it returns an error.
func (w *walk) tries(ctx context.Context, s *snapshot.Snapshot, actions []adoption.Action) (problems []string, err error) {
	if err := w.allowed(ctx, s, actions); err != nil {
		return nil, err
	}
	w.warnings.take()
	for _, a := range actions {
		err := w.write(ctx, s, a, metav1.DryRunAll)
		var answer apierrors.APIStatus
		if errors.As(err, &answer) {
			problems = append(problems, fmt.Sprintf("the apiserver refuses it (%s): %v", w.describe(a), err))
		} else if err != nil {
			return nil, fmt.Errorf("trying it (%s): %w: check the connection to the apiserver", w.describe(a), err)
		}
	}
	for _, warning := range w.warnings.take() {
		fmt.Fprintf(w.ErrOut, "warning: %s\n", warning)
	}
	return problems, nil
}

// refused prints what must be fixed before anything is changed.
func (w *walk) refused(problems []string) error {
	return w.print(adoption.Result{
		Workload: w.request.Target.String(), Changed: []adoption.Action{}, Problems: problems, Summary: "nothing was changed: fix this, then run the command again",
	}, true)
}

// describe names an action for users.
func (w *walk) describe(action adoption.Action) string {
	switch action {
	case adoption.CreateRoot:
		return "create ShardingConfig " + w.request.Wanted.Name
	case adoption.DeleteRoot:
		return "delete the ShardingConfig of " + w.request.Target.String()
	case adoption.SetLabel:
		return "label the pod template of " + w.request.Target.String()
	}
	return "remove the label from the pod template of " + w.request.Target.String()
}

// result returns the result of the last step.
func (w *walk) result(step adoption.Step) adoption.Result {
	out := adoption.Result{Workload: w.request.Target.String(), Done: step.Kind == adoption.Done, Changed: append([]adoption.Action{}, w.changed...), Do: step.Do}
	switch step.Kind {
	case adoption.Wait:
		out.Waiting = step.Why
		out.Summary = fmt.Sprintf("timed out after %s; run %s to go on", w.timeout, w.again)
	case adoption.Stop:
		out.Problems = []string{step.Why}
		out.Summary = "stopped; once it is fixed, run " + w.again + " to go on"
	}
	return out
}
