package policy

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// A status that the manager writes triggers no controller that would write it again.
func TestEventsThatTriggerPolicies(t *testing.T) {
	b := &v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{UID: "1", Generation: 1}}
	f := &v1alpha1.FaultInjection{ObjectMeta: metav1.ObjectMeta{UID: "1", Generation: 1}}
	s := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{UID: "1", Generation: 1}}
	n := controllers.MetadataOf(controllers.NamespaceKind)
	for _, c := range []struct {
		what   string
		before any
		change func(any)
		wakes  bool
	}{
		{"status", b, func(o any) { o.(*v1alpha1.CircuitBreaker).Status.Refused++ }, false},
		{"annotation", b, func(o any) { o.(*v1alpha1.CircuitBreaker).Annotations = map[string]string{"a": "b"} }, false},
		{"recover", b, func(o any) {
			o.(*v1alpha1.CircuitBreaker).Annotations = map[string]string{v1alpha1.RecoverAnnotation: "1"}
		}, true},
		{"disable", b, func(o any) {
			o.(*v1alpha1.CircuitBreaker).Labels = map[string]string{v1alpha1.DisableBreakerLabel: ""}
		}, true},
		{"spec", b, func(o any) { o.(*v1alpha1.CircuitBreaker).Generation++ }, true},
		{"status", f, func(o any) { o.(*v1alpha1.FaultInjection).Status.Injected++ }, false},
		{"expiry", f, func(o any) { o.(*v1alpha1.FaultInjection).Status.ExpirationGeneration++ }, true},
		{"status", s, func(o any) { o.(*v1alpha1.ShardingConfig).Status.ReadyMembers++ }, false},
		{"limits that members act by", s, func(o any) {
			o.(*v1alpha1.ShardingConfig).Status.Acting = &v1alpha1.ActingLimits{Hash: "a"}
		}, true},
		{"namespace", n, func(o any) { o.(*metav1.PartialObjectMetadata).ResourceVersion = "2" }, false},
		{"no faults", n, func(o any) {
			o.(*metav1.PartialObjectMetadata).Labels = map[string]string{v1alpha1.NoFaultsLabel: ""}
		}, true},
	} {
		after := c.before.(runtime.Object).DeepCopyObject()
		c.change(after)
		require.Equal(t, !c.wakes, sameMeaning(c.before, after), "%s of %T", c.what, c.before)
	}
}

// A member of a hand-written shard that appears after all others were gone for long may find the
// lock held by the mesh, which is about to release it.
func TestMembersByHandWaitUntilTheLockIsAskedFor(t *testing.T) {
	lock := types.NamespacedName{Namespace: "ns", Name: "lock"}
	why := func(s locks.State, ok bool) string {
		return unheld([]types.NamespacedName{lock}, func(types.NamespacedName) (locks.State, bool) { return s, ok })
	}
	require.Contains(t, why(locks.State{}, false), "does not hold lock ns/lock")
	require.Contains(t, why(locks.State{Holder: "other", Asked: 1}, true), "does not hold lock ns/lock")
	require.Contains(t, why(locks.State{Held: true}, true), "about to confirm that it keeps lock ns/lock")
	require.Empty(t, why(locks.State{Held: true, Asked: 1}, true))
}
