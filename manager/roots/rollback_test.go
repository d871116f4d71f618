package roots

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// reverting is a rolling mesh that rolls back what its analysis halts.
type reverting struct {
	*rolling
	patches int // of the StatefulSet, by the manager
	// before and after are called around such a patch, if they are not nil. An error of before
	// prevents it; an error of after is returned although it was made.
	before, after func() error
	forbidden     bool // reading ControllerRevisions
}

func newReverting(t *testing.T) *reverting {
	r := &reverting{rolling: newRolling(t)}
	r.funcs.Get = func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		if _, ok := o.(*appsv1.ControllerRevision); ok && r.forbidden {
			return apierrors.NewForbidden(appsv1.Resource("controllerrevisions"), key.Name, nil)
		}
		return c.Get(ctx, key, o, opts...)
	}
	r.funcs.Patch = func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
		if _, ok := o.(*appsv1.StatefulSet); !ok {
			return c.Patch(ctx, o, patch, opts...)
		}
		return r.patch(ctx, c, o, patch)
	}
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout.AutoRollback = true
		c.Spec.Root.Rollout.Analysis = &v1alpha1.RolloutAnalysis{MaxErrors: new(v1alpha1.Percent("5"))}
	})
	r.allow()
	return r
}

// patch patches the StatefulSet as the apiserver does.
func (r *reverting) patch(ctx context.Context, c client.Client, o client.Object, patch client.Patch) error {
	if r.before != nil {
		if err := r.before(); err != nil {
			return err
		}
	}
	if err := c.Patch(ctx, o, patch); err != nil {
		return err
	}
	r.patches++
	set := &appsv1.StatefulSet{}
	require.NoError(r, c.Get(ctx, client.ObjectKeyFromObject(o), set))
	set.Generation++
	require.NoError(r, c.Update(ctx, set))
	r.set = set
	if r.after != nil {
		return r.after()
	}
	return nil
}

// allow sets the annotation of the StatefulSet.
func (r *reverting) allow() {
	r.set.Annotations = map[string]string{v1alpha1.AllowRollbackAnnotation: "true"}
	require.NoError(r, r.Update(r.Context(), r.set))
}

// fails rolls out a revision whose requests fail, until shortly before the analysis sees that.
func (r *reverting) fails(revision string) {
	r.revise(revision)
	r.turns(soak / 2)
	canary := r.current("op-0")
	r.outcomes = map[string]push.Outcomes{string(canary.UID): {Requests: 1000, Errors: 60}}
}

// applied returns the revision of the template.
func (r *reverting) applied() string { return r.set.Spec.Template.Annotations[version] }

func TestHaltedRolloutIsRolledBackOnce(t *testing.T) {
	t.Parallel()
	r := newReverting(t)
	counted := testutil.ToFloat64(metrics.Rollbacks.WithLabelValues("ns", "op"))
	generation := r.set.Generation + 1
	r.fails("op-v2")
	r.turns(2 * time.Second)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	require.Zero(t, r.patches, "the halt is on record first")
	r.turns(soak / 2)
	require.Equal(t, map[string]string{version: "op-v1"}, r.set.Spec.Template.Annotations, "nothing of the bad template is left")
	require.Equal(t, []string{"op-0 op-v2", "op-0 op-v1"}, r.made, "and pods that go back do not soak")
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
	require.Contains(t, r.rollout().Message, "revision op-v2 was rolled back: 60 of 1000 requests")
	require.Equal(t, "op-v1", r.rollout().RolledBack[0].To)
	require.Equal(t, generation, r.rollout().RolledBack[0].Generation)
	require.True(t, r.saw("RolloutRolledBack"))
	require.Greater(t, testutil.ToFloat64(metrics.Rollbacks.WithLabelValues("ns", "op")), counted)

	r.revise("op-v2")
	for range 3 {
		r.turns(soak)
		r.lead()
	}
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	require.Contains(t, r.rollout().Message, "was rolled back before (60 of 1000 requests")
	require.Contains(t, r.rollout().Message, "set spec.root.rollout.autoRollback to false")
	require.Equal(t, []string{"op-0 op-v2", "op-0 op-v1"}, r.made, "no pod gets it")
	require.Equal(t, 1, r.patches)

	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Rollout.AutoRollback = false })
	r.turns(5 * soak)
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
	require.Empty(t, r.rollout().RolledBack, "it serves in all shards")
}

func TestUnreadyPodsAreRolledBack(t *testing.T) {
	t.Parallel()
	r := newReverting(t)
	r.broken["op-v2"] = true
	r.revise("op-v2")
	r.turns(5 * soak)
	require.Equal(t, []string{"op-0 op-v2", "op-0 op-v1"}, r.made)
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
	require.Equal(t, "not ready: pod op-0", r.rollout().RolledBack[0].Reason)
}

func TestRollbackNamesMissingPermissions(t *testing.T) {
	t.Parallel()
	r := newReverting(t)
	r.forbidden = true
	r.set.Annotations = nil
	require.NoError(t, r.Update(t.Context(), r.set))
	r.fails("op-v2")
	r.turns(soak / 2)
	const (
		annotate = "kubectl -n ns annotate statefulset op ctrlmesh.kusionstack.io/allow-rollback=true"
		bind     = "kubectl -n ns create rolebinding ctrlmesh-rollback --clusterrole=ctrlmesh-rollback --serviceaccount=ctrlmesh-system:ctrlmesh-manager"
	)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	require.Contains(t, r.rollout().Message, annotate+" && "+bind)
	require.Contains(t, r.condition(v1alpha1.ConditionDegraded).Message, bind)
	r.forbidden = false
	r.turns(soak / 2)
	require.Contains(t, r.rollout().Message, annotate)
	require.NotContains(t, r.rollout().Message, bind)
	require.Zero(t, r.patches)
	require.Empty(t, r.rollout().RolledBack, "nothing was decided")

	r.allow()
	r.before = func() error { return apierrors.NewForbidden(appsv1.Resource("statefulsets"), "op", errors.New("no")) }
	r.turns(soak / 2)
	require.Contains(t, r.rollout().Message, "is being rolled back to revision op-v1: ")
	require.Contains(t, r.rollout().Message, bind)
	r.before = nil
	r.turns(soak / 2)
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
	require.Equal(t, "op-v1", r.applied())
}

func TestRollbackNeverOverwritesACorrection(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		correct func(*reverting)
		last    string
		early   bool // before the StatefulSet is read, not just before it is patched
	}{
		"unseen by its controller": {func(r *reverting) { r.apply("op-v3") }, "op-v3", false},
		"seen by its controller":   {func(r *reverting) { r.revise("op-v3") }, "op-v3", false},
		"unseen, earlier":          {func(r *reverting) { r.apply("op-v3") }, "op-v3", true},
		"the same template again":  {func(r *reverting) { r.revise("op-v1"); r.revise("op-v2") }, "op-v2", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newReverting(t)
			r.meanwhile(tt.early, func() { tt.correct(r) })
			r.fails("op-v2")
			r.turns(5 * soak)
			require.Zero(t, r.patches)
			require.Equal(t, tt.last, r.applied())
			require.Equal(t, tt.last, r.rollout().Revision)
			require.Equal(t, "op-v2", r.rollout().RolledBack[0].Revision, "it was to be rolled back")
		})
	}
}

// meanwhile calls do once: just before the StatefulSet is patched or, early, once the rollback is on
// record.
func (r *reverting) meanwhile(early bool, do func()) {
	if !early {
		r.before = func() error {
			r.before = nil
			do()
			return nil
		}
		return
	}
	r.funcs.SubResourceUpdate = func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
		err := c.SubResource(sub).Update(ctx, o, opts...)
		if config, ok := o.(*v1alpha1.ShardingConfig); ok && config.Status.Root.Rollout != nil && config.Status.Root.Rollout.RolledBack != nil {
			r.funcs.SubResourceUpdate = nil
			do()
		}
		return err
	}
}

func TestNextLeaderContinuesRollback(t *testing.T) {
	t.Parallel()
	crash := errors.New("the manager has died")
	t.Run("before the template is restored", func(t *testing.T) {
		t.Parallel()
		r := newReverting(t)
		r.before = func() error { return crash }
		r.fails("op-v2")
		for r.rollout().RolledBack == nil {
			_ = r.round() // which fails at last
			r.now = r.now.Add(2 * time.Second)
		}
		require.Zero(t, r.patches)
		r.before = nil
		r.lead()
		r.push()
		r.turns(soak)
		require.Equal(t, 1, r.patches)
		require.Equal(t, "op-v1", r.applied())
	})
	t.Run("after the template was restored", func(t *testing.T) {
		t.Parallel()
		r := newReverting(t)
		r.after = func() error { return crash }
		r.fails("op-v2")
		for r.patches == 0 {
			_ = r.round()
			r.now = r.now.Add(2 * time.Second)
		}
		r.lead()
		r.apply("op-v2") // before any controller has seen the restored template
		r.control()
		r.push()
		r.turns(5 * soak)
		require.Equal(t, 1, r.patches)
		require.Equal(t, "op-v2", r.applied())
		require.Contains(t, r.rollout().Message, "was rolled back before")
	})
}

func TestRollbackNeedsAPodOfAnotherRevision(t *testing.T) {
	t.Parallel()
	r := newReverting(t)
	r.revise("op-v2")
	r.turns(soak + soak/2)
	require.Len(t, r.made, 2)
	r.broken["op-v2"] = true
	r.turns(5 * soak)
	require.Len(t, r.made, 3)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	require.Contains(t, r.rollout().Message, "no pod has a revision to go back to")
	require.Zero(t, r.patches)
}

func TestPausedRolloutIsNotRolledBack(t *testing.T) {
	t.Parallel()
	r := newReverting(t)
	r.fails("op-v2")
	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Rollout.Paused = true })
	r.turns(soak)
	require.Equal(t, v1alpha1.RolloutPaused, r.rollout().Phase)
	require.Zero(t, r.patches)
}
