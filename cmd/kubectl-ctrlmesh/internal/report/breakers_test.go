package report

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// Active and NotInForce read the conditions that the manager writes.
func TestConditionsOfTheManagerAreUnderstood(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "a", UID: "a", Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}},
		Spec:       corev1.PodSpec{NodeName: "node"}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	f := compile.Injection{FaultInjection: &v1alpha1.FaultInjection{}, Ruling: compile.Ruling{Hash: "hash", Targets: []compile.Target{{Pod: pod, Version: "v2"}}}}
	conditions := func(version string, problem *compile.Problem) []metav1.Condition {
		f.Problem = problem
		return status.OfInjection(f, status.TrafficInput{
			Policy: func(types.UID) *meshv1.PodPolicy { return nil },
			Observe: func(string, string) push.Observation {
				return push.Observation{Connected: true, Reported: true, Capture: v1alpha1.CaptureEBPF, Version: version}
			},
			Now: now, Since: now.Add(-time.Hour),
		}).Conditions
	}
	disabled := &compile.Problem{Reason: v1alpha1.ReasonDisabled, Message: "spec.disabled is set"}
	require.Contains(t, Active(nil), "not written yet")
	require.Contains(t, Active(conditions("v2", nil)), "InForce")
	require.Contains(t, Active(conditions("v1", disabled)), "pod a", "its agent has not confirmed")
	require.Empty(t, Active(conditions("v2", disabled)))

	require.Contains(t, NotInForce(nil), "not written yet")
	require.Contains(t, NotInForce(conditions("v1", nil)), "pod a")
	require.Contains(t, NotInForce(conditions("v2", disabled)), "Disabled")
	require.Empty(t, NotInForce(conditions("v2", nil)))
	f.Targets = nil
	require.Empty(t, NotInForce(conditions("v2", nil)), "no pod is selected")
}
