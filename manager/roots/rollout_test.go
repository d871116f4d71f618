package roots

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

const soak = time.Minute

// rolling is a mesh whose root replaces the pods of a StatefulSet: a canary and two shards.
type rolling struct {
	*mesh
	set     *appsv1.StatefulSet
	made    []string        // names of the pods that were replaced
	broken  map[string]bool // revisions whose pods do not become ready
	missing bool            // the StatefulSet makes no pods
}

func newRolling(t *testing.T) *rolling {
	r := &rolling{mesh: newMesh(t), broken: map[string]bool{}}
	r.set = &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "set", Generation: 1},
		Spec:       appsv1.StatefulSetSpec{Replicas: new(int32(3)), UpdateStrategy: appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType}},
		Status:     appsv1.StatefulSetStatus{ObservedGeneration: 1, UpdateRevision: "op-v1"},
	}
	require.NoError(t, r.Create(t.Context(), r.set))
	r.revise("op-v1")
	r.root(2, 1)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Canary = &v1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: []string{"blue"}}
		c.Spec.Root.Rollout = &v1alpha1.Rollout{Soak: v1alpha1.Duration(soak.String())}
	})
	r.turns(time.Minute)
	r.made = nil
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase)
	return r
}

// version is the annotation of a template that names its revision.
const version = "version"

// revise changes the template of the StatefulSet, and lets its controller see that.
func (r *rolling) revise(revision string) {
	r.apply(revision)
	r.control()
}

// apply changes the template of the StatefulSet.
func (r *rolling) apply(revision string) {
	set := r.set.DeepCopy()
	set.Generation++
	set.Spec.Template.Annotations = map[string]string{version: revision, "only-" + revision: ""}
	require.NoError(r, r.Update(r.Context(), set))
	r.set = set
}

// control does what the controller of the StatefulSet does with its template.
func (r *rolling) control() {
	set := &appsv1.StatefulSet{}
	require.NoError(r, r.Get(r.Context(), client.ObjectKeyFromObject(r.set), set))
	set.Status.ObservedGeneration, set.Status.UpdateRevision = set.Generation, set.Spec.Template.Annotations[version]
	if !equality.Semantic.DeepEqual(set.Status, r.set.Status) {
		require.NoError(r, r.Status().Update(r.Context(), set))
	}
	r.set = set
	revision := &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: set.Status.UpdateRevision, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("StatefulSet"))}},
		Data:       runtime.RawExtension{Raw: fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{%q:%q}},"$patch":"replace"}}}`, version, set.Status.UpdateRevision)},
	}
	require.NoError(r, client.IgnoreAlreadyExists(r.Create(r.Context(), revision)))
}

// turns lets time pass. Pods that lack are made with the revision of the StatefulSet.
func (r *rolling) turns(d time.Duration) {
	r.Helper()
	for end := r.now.Add(d); r.now.Before(end); r.now = r.now.Add(2 * time.Second) {
		require.NoError(r, r.round())
		r.push()
		r.control()
		for n := range 3 {
			p := &corev1.Pod{}
			err := r.Get(r.Context(), client.ObjectKey{Namespace: "ns", Name: names[n]}, p)
			if apierrors.IsNotFound(err) && !r.missing {
				r.replace(n)
			}
		}
	}
}

var names = []string{"op-0", "op-1", "op-2"}

// current returns a pod as it is now.
func (r *rolling) current(name string) *corev1.Pod {
	r.Helper()
	p := &corev1.Pod{}
	require.NoError(r, r.Get(r.Context(), client.ObjectKey{Namespace: "ns", Name: name}, p))
	return p
}

func (r *rolling) replace(ordinal int) {
	p, revision := r.pod(ordinal), r.set.Status.UpdateRevision
	r.made = append(r.made, p.Name+" "+revision)
	p.Labels[appsv1.ControllerRevisionHashLabelKey] = revision
	require.NoError(r, r.Update(r.Context(), p))
	if r.broken[revision] {
		p.Status.Conditions[0].Status = corev1.ConditionFalse
		require.NoError(r, r.Status().Update(r.Context(), p))
	}
}

func (r *rolling) rollout() *v1alpha1.RolloutStatus {
	r.Helper()
	status := r.get().Status.Root
	require.NotNil(r, status)
	require.NotNil(r, status.Rollout)
	return status.Rollout
}

func (r *rolling) condition(kind string) metav1.Condition {
	r.Helper()
	c := apimeta.FindStatusCondition(r.get().Status.Conditions, kind)
	require.NotNil(r, c)
	return *c
}

// saw reports whether an Event had a reason.
func (r *rolling) saw(reason string) bool {
	for {
		select {
		case e := <-r.recorder.Events:
			if strings.Contains(e, " "+reason+" ") {
				return true
			}
		default:
			return false
		}
	}
}

func TestRolloutReplacesPodsShardByShard(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.revise("op-v2")
	r.turns(soak / 2)
	require.Equal(t, []string{"op-0 op-v2"}, r.made, "the canary first")
	require.Equal(t, v1alpha1.RolloutSoaking, r.rollout().Phase, "%s", r.rollout().Message)
	require.Equal(t, "op-0-canary", r.rollout().Shard)

	r.lead() // the next leader goes on
	r.turns(soak)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
	require.Equal(t, "op-1-normal", r.rollout().Shard)
	r.turns(2 * soak)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2", "op-2 op-v2"}, r.made)
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
	require.True(t, r.saw("RolloutComplete"))

	r.turns(soak)
	require.Len(t, r.made, 3)
}

func TestRolloutHaltsAtTheCanaryAndIsRolledBack(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.broken["op-v2"] = true
	r.revise("op-v2")
	for range 4 {
		r.turns(soak)
		r.lead() // which does not begin anew
	}
	r.turns(soak / 4)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	degraded := r.condition(v1alpha1.ConditionDegraded)
	require.Equal(t, string(v1alpha1.ReasonRolloutHalted), degraded.Reason)
	require.Contains(t, degraded.Message, "not ready: pod op-0")
	require.True(t, r.saw("RolloutHalted"))

	r.revise("op-v1")
	r.turns(soak)
	require.Equal(t, []string{"op-0 op-v2", "op-0 op-v1"}, r.made, "no other pod has changed")
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
}

// The analysis holds back a version whose pods are ready, for the next leader too, until another
// revision is rolled out or the analysis is removed.
func TestRolloutIsHaltedByItsAnalysis(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout.Analysis = &v1alpha1.RolloutAnalysis{MaxErrors: new(v1alpha1.Percent("5"))}
	})
	r.revise("op-v2")
	r.turns(soak / 2)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	canary := r.current("op-0")
	r.outcomes = map[string]push.Outcomes{string(canary.UID): {Requests: 1000, Errors: 60}}
	r.turns(10 * time.Second)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	require.Contains(t, r.rollout().Failure, "60 of 1000 requests (6.0 %) failed, and 5 % may")
	r.lead()
	r.outcomes = nil
	r.change(func(c *v1alpha1.ShardingConfig) { // which shards release everything for
		c.Spec.Root.ResourceSelector = append(c.Spec.Root.ResourceSelector, v1alpha1.ObjectLimiter{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"secrets"}}}})
	})
	r.turns(5 * soak)
	require.Equal(t, []string{"op-0 op-v2", "op-0 op-v2"}, r.made, "the canary was restarted because of the change")
	require.Equal(t, "op-0-canary", r.rollout().Shard)
	require.Equal(t, string(v1alpha1.ReasonRolloutHalted), r.condition(v1alpha1.ConditionDegraded).Reason)

	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Rollout.Analysis = nil })
	r.turns(5 * soak)
	require.Equal(t, []string{"op-1 op-v2", "op-2 op-v2"}, r.made[2:])
	require.Empty(t, r.rollout().Failure)
}

// The analysis of the second shard is no second one of the first.
func TestRolloutPassesItsAnalysis(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout = &v1alpha1.Rollout{Soak: "1s", Analysis: &v1alpha1.RolloutAnalysis{MaxErrors: new(v1alpha1.Percent("5"))}}
	})
	r.revise("op-v2")
	r.turns(30 * time.Second)
	require.Equal(t, []string{"op-0 op-v2"}, r.made, "an analysis takes 30 s at least")
	r.turns(10 * time.Second)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
	require.Equal(t, "op-1-normal", r.rollout().Shard)
	require.True(t, r.rollout().Shards[0].Soaked)
	r.turns(50 * time.Second)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2", "op-2 op-v2"}, r.made)
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
}

// While a shard that has soaked does not serve, no further pods are replaced. It does not soak anew,
// nor do the others.
func TestRolloutWaitsForAnEarlierShard(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.revise("op-v2")
	r.turns(soak + 20*time.Second)
	require.Len(t, r.made, 2)
	require.Equal(t, "op-1-normal", r.rollout().Shard)
	canary := r.current("op-0")
	ready := func(is corev1.ConditionStatus) {
		canary.Status.Conditions[0].Status = is
		require.NoError(t, r.Status().Update(t.Context(), canary))
	}
	ready(corev1.ConditionFalse)
	r.turns(2 * soak)
	require.Len(t, r.made, 2)
	require.Equal(t, "op-0-canary", r.rollout().Shard)
	require.Contains(t, r.rollout().Message, "not ready: pod op-0")
	ready(corev1.ConditionTrue)
	r.turns(10 * time.Second)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2", "op-2 op-v2"}, r.made)
}

// work lets time pass in which pods write so many objects in each turn.
func (r *rolling) work(d time.Duration, canary, others uint64) {
	r.Helper()
	if r.outcomes == nil {
		r.outcomes = map[string]push.Outcomes{}
	}
	for end := r.now.Add(d); r.now.Before(end); r.turns(2 * time.Second) {
		for i, name := range names {
			uid, writes := string(r.current(name).UID), others
			if i == 0 {
				writes = canary
			}
			o := r.outcomes[uid]
			o.Requests, o.Writes = o.Requests+writes, o.Writes+writes
			r.outcomes[uid] = o
		}
	}
}

// comparing rolls out a revision whose writes are compared, until the canary serves under it.
func comparing(t *testing.T) *rolling {
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout = &v1alpha1.Rollout{Soak: "1s", Analysis: &v1alpha1.RolloutAnalysis{MaxWritesRatio: new(int32(3))}}
	})
	r.revise("op-v2")
	for range 10 {
		r.work(2*time.Second, 10, 10)
		if s := r.rollout().Shards; len(s) > 0 && s[0].Since != nil && len(r.made) == 1 {
			return r
		}
	}
	require.FailNow(t, "the canary does not serve", "%+v", r.rollout())
	return nil
}

// A new leader may write each of its objects once: only what it writes later is compared.
func TestRolloutComparesWritesOfASettledShard(t *testing.T) {
	t.Parallel()
	r := comparing(t)
	r.work(20*time.Second, 1000, 1)
	r.work(30*time.Second, 10, 10)
	require.Equal(t, []string{"op-0 op-v2"}, r.made, "a comparison takes 60 s at least")
	r.work(20*time.Second, 10, 10)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
	require.Empty(t, r.rollout().Failure)
}

func TestRolloutIsHaltedByItsWrites(t *testing.T) {
	t.Parallel()
	r := comparing(t)
	r.work(70*time.Second, 100, 1)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase, "%s", r.rollout().Message)
	require.Contains(t, r.rollout().Failure, "more than 3 times as many for each as in shard op-")
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
}

// Counts that an agent begins anew are compared with none from before, whether the manager has heard
// of the restart at once or not.
func TestRolloutHaltsWhileAgentsRestart(t *testing.T) {
	t.Parallel()
	for i, name := range names[:2] {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := comparing(t)
			for range 2 {
				r.work(40*time.Second, 100, 1)
				pod := r.current(name)
				uid, node := string(pod.UID), pod.Spec.NodeName
				seen := r.seen[uid]
				delete(r.seen, uid)
				r.away[node] = true
				r.work(10*time.Second, 100, 1)
				delete(r.away, node)
				r.seen[uid], r.outcomes[uid] = seen, push.Outcomes{Requests: 1}
			}
			require.Equal(t, []string{"op-0 op-v2"}, r.made, "%d", i)
			r.work(70*time.Second, 100, 1)
			require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase, "%s", r.rollout().Message)
			require.Equal(t, []string{"op-0 op-v2"}, r.made)
		})
	}
}

// An agent that restarts has not seen what a pod did before: the analysis begins anew.
func TestRolloutAnalyzesAnewAfterAnAgentRestarted(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout = &v1alpha1.Rollout{Soak: "1s", Analysis: &v1alpha1.RolloutAnalysis{MaxErrors: new(v1alpha1.Percent("5"))}}
	})
	r.revise("op-v2")
	r.turns(20 * time.Second)
	canary := r.current("op-0")
	r.outcomes = map[string]push.Outcomes{string(canary.UID): {Requests: 40, Errors: 40}} // too few to judge
	r.turns(4 * time.Second)
	r.outcomes = map[string]push.Outcomes{string(canary.UID): {Requests: 1}}
	r.turns(26 * time.Second)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	r.turns(10 * time.Second)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
}

func TestRolloutIsHaltedByItsLatency(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout.Analysis = &v1alpha1.RolloutAnalysis{MaxLatencyRatio: new(int32(3))}
	})
	r.revise("op-v2")
	r.turns(soak * 3 / 4) // the shard has settled
	r.outcomes = map[string]push.Outcomes{}
	for i, name := range names {
		pod := r.current(name)
		r.outcomes[string(pod.UID)] = push.Outcomes{Requests: 60, Answered: 60, LatencyMicros: []uint64{60 * 70, 60 * 10, 60 * 20}[i]}
	}
	r.turns(soak / 2)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase, "%s", r.rollout().Message)
	require.Equal(t, "60 requests took 70µs on average, more than 3 times as long as in shard op-2-normal: 20µs", r.rollout().Failure)
}

func TestRolloutIsHaltedByRestarts(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout.Analysis = &v1alpha1.RolloutAnalysis{MaxRestarts: new(int32(2))}
	})
	restart := func(name string, n int32, ready corev1.ConditionStatus) {
		pod := r.current(name)
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: n}}
		pod.Status.Conditions[0].Status = ready
		require.NoError(t, r.Status().Update(t.Context(), pod))
	}
	restart("op-0", 100, corev1.ConditionTrue)
	r.revise("op-v2")
	r.turns(soak / 4)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	for n := range int32(2) { // the canary never soaks, and always serves again
		restart("op-0", n, corev1.ConditionFalse)
		r.turns(soak / 2)
		restart("op-0", n+1, corev1.ConditionTrue)
		r.turns(soak / 2)
		require.Equal(t, v1alpha1.RolloutSoaking, r.rollout().Phase, "%s", r.rollout().Message)
	}
	restart("op-0", 3, corev1.ConditionTrue)
	r.turns(4 * time.Second)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase, "%s", r.rollout().Message)
	require.Equal(t, "containers have restarted 3 times, more than 2", r.rollout().Failure)
	r.lead() // which does not know of the restarts
	r.turns(5 * soak)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
}

// A pod that already has the revision may have restarted long ago.
func TestEarlierRestartsDoNotHaltRollout(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout.Analysis = &v1alpha1.RolloutAnalysis{MaxRestarts: new(int32(0))}
	})
	pod := r.current("op-1")
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 100}}
	require.NoError(t, r.Status().Update(t.Context(), pod))
	r.revise("op-v2")
	r.turns(soak / 2)
	require.NoError(t, r.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op-2"}}))
	r.turns(soak / 4)
	require.Equal(t, []string{"op-0 op-v2", "op-2 op-v2"}, r.made)
	r.revise("op-v1")
	r.turns(5 * soak)
	require.Equal(t, []string{"op-0 op-v1", "op-2 op-v1"}, r.made[2:])
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
}

func TestRolloutIsPaused(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Rollout.Paused = true })
	r.revise("op-v2")
	r.turns(2 * soak)
	require.Empty(t, r.made)
	require.Equal(t, v1alpha1.RolloutPaused, r.rollout().Phase)
	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Rollout.Paused = false })
	r.turns(5 * soak)
	require.Len(t, r.made, 3)
}

// A pod whose caches have objects of other shards waits for the rollout to reach its shard: its
// successor would have the new revision.
func TestRolloutComesBeforeOtherRestarts(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.broken["op-v2"] = true
	r.revise("op-v2")
	r.turns(soak)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Canary.InNamespaces = []string{"blue", "green", "red"} })
	r.turns(5 * soak)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
}

func TestRolloutRequiresOnDelete(t *testing.T) {
	t.Parallel()
	for name, partition := range map[string]*appsv1.RollingUpdateStatefulSetStrategy{"by default": nil, "with a partition above all pods": {Partition: new(int32(3))}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRolling(t)
			r.set.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType, RollingUpdate: partition}
			r.revise("op-v2")
			r.turns(soak)
			require.Empty(t, r.made)
			require.Equal(t, v1alpha1.RolloutBlocked, r.rollout().Phase)
			degraded := r.condition(v1alpha1.ConditionDegraded)
			require.Equal(t, string(v1alpha1.ReasonRolloutBlocked), degraded.Reason)
			require.Contains(t, degraded.Message, "the highest ordinals get a revision first, and the canary has the lowest")
			_, command, _ := strings.Cut(degraded.Message, "set OnDelete: ")
			require.Equal(t, `kubectl -n ns patch statefulset op --type=merge -p '{"spec":{"updateStrategy":{"type":"OnDelete","rollingUpdate":null}}}'`, command)
		})
	}
}

// A rollout whose StatefulSet makes no successor replaces no other pod.
func TestRolloutWaitsForTheSuccessor(t *testing.T) {
	t.Parallel()
	r := newRolling(t)
	r.missing = true
	r.revise("op-v2")
	r.turns(soak)
	r.lead() // the next leader does not know what the last one has evicted
	r.turns(10 * soak)
	require.Equal(t, "op-0-canary", r.rollout().Shard)
	require.Len(t, r.world().Pods, 2)
}
