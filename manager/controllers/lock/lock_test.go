package lock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// No release follows a round that asked for the lock without one between them that did not.
func TestLockByHandIsWatchedBeforeItsRelease(t *testing.T) {
	config := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "by-hand", UID: "c"}}
	config.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "op"}}
	config.Spec.Controller = &v1alpha1.ControllerConfig{LeaderElectionName: "lock"}
	member := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "op-0", UID: "p", Annotations: map[string]string{v1alpha1.TrustAnnotation: "both"},
		Labels: map[string]string{"app": "op", v1alpha1.EnableProxyLabel: "true"},
	}}
	r := &Controller{Keeper: &locks.Keeper{}, Push: &push.Server{}, State: &controllers.State{}}
	now := time.Unix(1000, 0)
	demand := func(after time.Duration, pods ...*corev1.Pod) locks.Demand {
		now = now.Add(after)
		l := &controllers.Listed{Configs: []*v1alpha1.ShardingConfig{config}, Pods: pods}
		r.State.Compiled.Store(&controllers.Compiled{Result: compile.Result{Policies: map[types.UID]compile.Policy{}}, Listed: l})
		out := r.handWrittenDemands(l, now)
		require.Len(t, out, 2)
		require.Len(t, out[0].Locks, 1)
		require.Equal(t, types.NamespacedName{Namespace: "ns", Name: "lock"}, out[0].Locks[0].NamespacedName)
		return out[0]
	}
	asked := func(d locks.Demand) bool { return d.Asked > 0 }

	require.True(t, asked(demand(0, member)))
	d := demand(2 * membersGone)
	require.Equal(t, locks.Watch, d.Mode)
	require.False(t, asked(d), "a release may follow")
	require.True(t, asked(demand(time.Second, member)))
	require.Equal(t, locks.Watch, demand(membersGone).Mode)
	d = demand(membersGone)
	require.Equal(t, locks.Release, d.Mode)
	require.False(t, asked(d))
}
