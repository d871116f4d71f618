package roots

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// RollbackRole is the ClusterRole that an administrator binds to the manager in a namespace, so
// that it may restore the templates of StatefulSets there.
const RollbackRole = "ctrlmesh-rollback"

// previous is what was read of a revision to go back to.
type previous struct {
	at    time.Time
	known decide.Previous
}

// readPrevious reads now and then whether the revision to go back to exists, and whether the
// manager may restore its template.
func (rt *runner) readPrevious(ctx context.Context, f *decide.Facts, now time.Time) {
	to, last := decide.PreviousRevision(*f), &rt.lookups.previous
	if to == "" {
		*last = previous{}
		return
	}
	if last.known.Revision != to || now.Sub(last.at) >= revisionEvery {
		*last = previous{now, decide.Previous{Revision: to, Problem: rt.rollbackProblem(ctx, f.Spec.Config, to)}}
	}
	f.Previous = last.known
}

// rollbackProblem returns why the template of a revision cannot be restored, and what to do; empty
// if it can.
func (rt *runner) rollbackProblem(ctx context.Context, config *v1alpha1.ShardingConfig, to string) string {
	_, err := readTemplate(ctx, rt.of.Client, config.Namespace, to, "")
	switch {
	case apierrors.IsForbidden(err):
		return "the manager may not change the StatefulSet: " + rt.grantRollback(config, true)
	case err != nil:
		return err.Error()
	case !rt.lookups.allows:
		return "the StatefulSet does not allow it: " + rt.grantRollback(config, false)
	}
	return ""
}

// grantRollback returns the commands that permit a rollback: of the annotation if the StatefulSet
// lacks it, and of the RoleBinding if bind is true.
func (rt *runner) grantRollback(config *v1alpha1.ShardingConfig, bind bool) string {
	var commands []string
	if !rt.lookups.allows {
		commands = append(commands, fmt.Sprintf("kubectl -n %s annotate statefulset %s %s=true", config.Namespace, layout.Target(config.Spec.Root).Name, v1alpha1.AllowRollbackAnnotation))
	}
	if bind {
		commands = append(commands, fmt.Sprintf("kubectl -n %[1]s create rolebinding %[2]s --clusterrole=%[2]s --serviceaccount=%[3]s:%[4]s", config.Namespace, RollbackRole, rt.of.Account.Namespace, rt.of.Account.Name))
	}
	return strings.Join(commands, " && ")
}

// rollBack restores the template of a root's StatefulSet, if it has not changed since that was
// decided. It changes nothing but the template.
func (rt *runner) rollBack(ctx context.Context, config *v1alpha1.ShardingConfig, r *decide.Rollback, now time.Time) error {
	rt.lookups.read = now.Add(-revisionEvery) // the next round reads the StatefulSet
	target, set := layout.Target(config.Spec.Root), &appsv1.StatefulSet{}
	if err := rt.of.Client.Get(ctx, client.ObjectKey{Namespace: config.Namespace, Name: target.Name}, set); err != nil {
		return client.IgnoreNotFound(fmt.Errorf("reading %s: %w", target, err))
	}
	if set.Generation != r.Generation || set.Status.ObservedGeneration != r.Generation || set.Status.UpdateRevision != r.Revision {
		return nil // it has been changed
	}
	template, err := readTemplate(ctx, rt.of.Client, config.Namespace, r.To, set.UID)
	if err == nil {
		err = restore(ctx, rt.of.Client, set, template)
	}
	switch {
	case apierrors.IsConflict(err):
		return nil // the next round reads what it is now
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err): // by RBAC, or by an admission policy
		rt.memory = rt.memory.RollbackRefused(r, fmt.Sprintf("%v: %s", err, rt.grantRollback(config, true)))
		return nil
	case err != nil:
		rt.memory = rt.memory.RollbackRefused(r, err.Error())
		return fmt.Errorf("rolling back %s: %w", target, err)
	}
	metrics.Rollbacks.WithLabelValues(config.Namespace, config.Name).Inc()
	rt.of.Recorder.Eventf(config, set, corev1.EventTypeWarning, decide.RolloutRolledBack, "RollBack", "%s",
		status.Note(fmt.Sprintf("revision %s was rolled back to %s: %s", r.Revision, r.To, r.Reason)))
	return nil
}

// readTemplate returns the pod template of a revision of a StatefulSet. The controller of the
// StatefulSet has written it as a strategic merge patch that replaces another one. An empty uid is
// that of any StatefulSet.
func readTemplate(ctx context.Context, c client.Reader, namespace, name string, uid types.UID) (json.RawMessage, error) {
	revision := &appsv1.ControllerRevision{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, revision); err != nil {
		return nil, fmt.Errorf("reading revision %s: %w", name, err)
	}
	if owner := metav1.GetControllerOf(revision); owner == nil || uid != "" && owner.UID != uid {
		return nil, fmt.Errorf("revision %s does not belong to the StatefulSet", name)
	}
	var data struct {
		Spec struct{ Template json.RawMessage }
	}
	if err := json.Unmarshal(revision.Data.Raw, &data); err != nil {
		return nil, fmt.Errorf("decoding revision %s: %w", name, err)
	}
	if len(data.Spec.Template) == 0 {
		return nil, fmt.Errorf("revision %s has no pod template", name)
	}
	return data.Spec.Template, nil
}

// restore replaces the pod template of a StatefulSet, unless it was changed after it was read.
func restore(ctx context.Context, c client.Writer, set *appsv1.StatefulSet, template json.RawMessage) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": set.UID, "resourceVersion": set.ResourceVersion},
		"spec":     map[string]any{"template": template},
	})
	if err != nil {
		return err
	}
	return c.Patch(ctx, set, client.RawPatch(types.StrategicMergePatchType, patch))
}
