package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// TestRollout rolls out a version whose image does not exist, which stops at the canary, rolls it
// back, and rolls out another one, which goes through all shards.
func TestRollout(t *testing.T) {
	t.Parallel()
	const soak = 5 * time.Second
	r := newRoot(t, "e2e-rollout", 3, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		TargetStatefulSet: workload,
		Canary:            &meshv1alpha1.CanaryConfig{Replicas: new(int32(1)), InNamespaces: []string{"canary"}},
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
		Rollout:           &meshv1alpha1.Rollout{Soak: meshv1alpha1.Duration(soak.String())},
	}})
	r.settles(t, 3)
	r.rollsOut(t, meshv1alpha1.RolloutBlocked, "")
	degraded := apimeta.FindStatusCondition(r.config(t).Status.Conditions, meshv1alpha1.ConditionDegraded)
	require.Equal(t, string(meshv1alpha1.ReasonRolloutBlocked), degraded.Reason, "%s", degraded.Message)
	r.revise(t, func(set *appsv1.StatefulSet) {
		set.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType}
	})
	r.rollsOut(t, meshv1alpha1.RolloutComplete, "")

	before := r.pods(t, 3)
	image := before[0].Spec.Containers[0].Image
	r.revise(t, func(set *appsv1.StatefulSet) { set.Spec.Template.Spec.Containers[0].Image = "localhost/missing:dev" })
	r.rollsOut(t, meshv1alpha1.RolloutUpdating, "not ready: pod "+before[0].Name)
	r.revise(t, func(set *appsv1.StatefulSet) { set.Spec.Template.Spec.Containers[0].Image = image })
	r.rollsOut(t, meshv1alpha1.RolloutComplete, "")
	after := r.pods(t, 3)
	require.NotEqual(t, before[0].UID, after[0].UID)
	for i := range 2 {
		require.Equal(t, before[i+1].UID, after[i+1].UID, "a bad version reached %s", after[i+1].Name)
	}

	r.annotate(t, "v2")
	r.rollsOut(t, meshv1alpha1.RolloutSoaking, "")
	r.rollsOut(t, meshv1alpha1.RolloutComplete, "")
	after = r.pods(t, 3)
	for i, pod := range after {
		require.Equal(t, "v2", pod.Annotations["version"], "%s", pod.Name)
		if i > 0 {
			require.GreaterOrEqual(t, pod.CreationTimestamp.Sub(after[i-1].CreationTimestamp.Time), soak, "%s came too early", pod.Name)
		}
	}
	r.settles(t, 3)
	r.analyzes(t, after)
	r.countsRestarts(t)
}

// analyzes rolls out a version whose canary is ready and writes what other shards own, which is
// refused. The analysis holds it back.
func (r root) analyzes(t *testing.T, before []*corev1.Pod) {
	t.Helper()
	rollout := func(rollout meshv1alpha1.Rollout) {
		t.Helper()
		r.change(t, 3, func(spec *meshv1alpha1.ShardingConfigSpec) { spec.Root.Rollout = &rollout })
	}
	rollout(meshv1alpha1.Rollout{Soak: "1h", AutoRollback: true, Analysis: &meshv1alpha1.RolloutAnalysis{MaxErrors: new(meshv1alpha1.Percent("20"))}})
	r.annotate(t, "v3")
	r.rollsOut(t, meshv1alpha1.RolloutSoaking, "")
	canary := r.pods(t, 1)[0]
	clientset, err := kubernetes.NewForConfig(from(t, canary))
	require.NoError(t, err)
	for range 100 {
		_, err := clientset.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "of-others"}}, metav1.CreateOptions{})
		require.True(t, apierrors.IsForbidden(err), "%v", err)
	}
	r.rollsOut(t, meshv1alpha1.RolloutHalted, "")
	require.Contains(t, r.config(t).Status.Root.Rollout.Failure, "failed, and 20 % may")
	for i, pod := range r.pods(t, 3)[1:] {
		require.Equal(t, before[i+1].UID, pod.UID, "a bad version reached %s", pod.Name)
	}
	r.rollsBack(t, before)
	rollout(meshv1alpha1.Rollout{Soak: "1s"})
	r.rollsOut(t, meshv1alpha1.RolloutComplete, "")
}

// countsRestarts rolls out a version whose canary crashes once, and serves again. The analysis
// holds it back.
func (r root) countsRestarts(t *testing.T) {
	t.Helper()
	before := r.pods(t, 3)
	r.change(t, 3, func(spec *meshv1alpha1.ShardingConfigSpec) {
		spec.Root.Rollout = &meshv1alpha1.Rollout{Soak: "1h", Analysis: &meshv1alpha1.RolloutAnalysis{MaxRestarts: new(int32(0))}}
	})
	r.annotate(t, "v4")
	r.rollsOut(t, meshv1alpha1.RolloutSoaking, "")
	require.NoError(t, operatorProcess(t, r.pods(t, 1)[0], "probe").Kill())
	r.rollsOut(t, meshv1alpha1.RolloutHalted, "")
	require.Contains(t, r.config(t).Status.Root.Rollout.Failure, "containers have restarted 1 times")
	for i, pod := range r.pods(t, 3)[1:] {
		require.Equal(t, before[i+1].UID, pod.UID, "a bad version reached %s", pod.Name)
	}
}

// rollsBack permits the manager to roll back version v3, which has halted, and applies v3 again.
func (r root) rollsBack(t *testing.T, before []*corev1.Pod) {
	t.Helper()
	until(t, "the commands that permit the rollback", func(context.Context) error {
		message := r.config(t).Status.Root.Rollout.Message
		if !strings.Contains(message, "annotate statefulset "+workload) || !strings.Contains(message, "create rolebinding ctrlmesh-rollback") {
			return errors.New(message)
		}
		return nil
	})
	create(t, kube.AllowRollback(r.home))
	r.revise(t, func(set *appsv1.StatefulSet) {
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, meshv1alpha1.AllowRollbackAnnotation, "true")
	})
	restored := before[1].Labels[appsv1.ControllerRevisionHashLabelKey]
	until(t, "the rollback", func(context.Context) error {
		rollout := r.config(t).Status.Root.Rollout
		if rollout.Phase != meshv1alpha1.RolloutComplete || rollout.Revision != restored || len(rollout.RolledBack) != 1 {
			return fmt.Errorf("rollout: %+v", rollout)
		}
		return nil
	})
	after := r.pods(t, 3)
	for i, pod := range after {
		require.Equal(t, "v2", pod.Annotations["version"], "%s", pod.Name)
		require.Equal(t, i > 0, before[i].UID == pod.UID, "%s", pod.Name)
	}
	r.annotate(t, "v3")
	r.rollsOut(t, meshv1alpha1.RolloutHalted, "")
	require.Contains(t, r.config(t).Status.Root.Rollout.Message, "was rolled back before")
	for i, pod := range r.pods(t, 3) {
		require.Equal(t, after[i].UID, pod.UID, "a bad version reached %s", pod.Name)
	}
}

// annotate rolls out a version, which is an annotation of the template.
func (r root) annotate(t *testing.T, version string) {
	t.Helper()
	r.revise(t, func(set *appsv1.StatefulSet) { set.Spec.Template.Annotations = map[string]string{"version": version} })
}

// revise edits the StatefulSet, and waits until its controller has seen that.
func (r root) revise(t *testing.T, edit func(*appsv1.StatefulSet)) {
	t.Helper()
	set := &appsv1.StatefulSet{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: r.home, Name: workload}, set))
	before := set.DeepCopy()
	edit(set)
	require.NoError(t, cluster.Patch(t.Context(), set, client.MergeFrom(before)))
	until(t, "the revision of the StatefulSet", func(ctx context.Context) error { return cluster.Observed(ctx, set) })
}

// rollsOut waits until a rollout of the StatefulSet's revision is in a phase, with a message.
func (r root) rollsOut(t *testing.T, phase meshv1alpha1.RolloutPhase, message string) {
	t.Helper()
	set := &appsv1.StatefulSet{}
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: r.home, Name: workload}, set))
	until(t, "the rollout to be "+string(phase), func(context.Context) error {
		root := r.config(t).Status.Root
		if root == nil || root.Rollout == nil || root.Rollout.Phase != phase || root.Rollout.Revision != set.Status.UpdateRevision ||
			message != "" && root.Rollout.Message != message {
			return fmt.Errorf("root: %+v", root)
		}
		return nil
	})
}
