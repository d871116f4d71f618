package compile

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

func TestShadowLeadsBesideTheHolderOfTheOperatorLock(t *testing.T) {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "next", UID: "c"}}
	c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "next"}}
	c.Spec.Controller = &v1alpha1.ControllerConfig{LeaderElectionName: "op"}
	c.Spec.Shadow = &v1alpha1.Shadow{Window: "30s", IgnoredFields: []string{"status"}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p",
		Labels: map[string]string{"app": "next", v1alpha1.EnableProxyLabel: "true"}, Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}}}
	early := pod.DeepCopy()
	early.UID, early.Annotations = "early", map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustBoth}
	known := map[origin.Name]Root{origin.Of(c): {Locks: []v1alpha1.LockStatus{{Namespace: "ns", Name: "op", Holder: "outside"}}}}

	r := Compile([]*v1alpha1.ShardingConfig{c}, []*corev1.Pod{pod, early}, known, Rules{})
	p := r.Policies["p"]
	require.Empty(t, p.GetRefuse())
	require.Equal(t, "op---next", p.GetSharding().GetLocks()[0].GetUpstreamName())
	require.Equal(t, int64(30*time.Second), p.GetSharding().GetShadow().GetWindowNs())
	require.Equal(t, []string{"status"}, p.GetSharding().GetShadow().GetIgnoredFields())
	require.False(t, p.GetFailOpen())
	require.Contains(t, r.Policies["early"].GetRefuse(), "delete the pod so that it is admitted anew", "its writes would take effect without its configuration")

	known[origin.Of(c)] = Root{Standby: "the apiserver does not serve a resource"}
	p = Compile([]*v1alpha1.ShardingConfig{c}, []*corev1.Pod{pod}, known, Rules{}).Policies["p"]
	require.True(t, p.GetSharding().GetStandby())
	require.NotNil(t, p.GetSharding().GetShadow())

	c.Spec.Shadow.Window = "1h"
	require.Contains(t, Compile([]*v1alpha1.ShardingConfig{c}, []*corev1.Pod{pod}, known, Rules{}).Policies["p"].GetRefuse(), "spec.shadow.window must be from 1s to 5m0s")
}
