package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// A member in standby has applied the policy that it was sent, and owns nothing.
func TestReadyOnlyOncePoliciesAreApplied(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	pods := []types.UID{m.pod(0).UID, m.pod(1).UID}
	for range 100 {
		require.NoError(t, m.round())
		s := m.get().Status
		if s.ReadyMembers > 0 || meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReady) {
			for _, uid := range pods {
				require.False(t, m.policies[uid].GetSharding().GetStandby(), "%d members are ready, and %s is in standby", s.ReadyMembers, uid)
			}
		}
		if s.ReadyMembers == 2 && s.Root.Handover == "Settled" {
			return
		}
		m.push()
		m.now = m.now.Add(time.Second)
	}
	t.Fatal("the root does not settle")
}

// A manager that has not heard of all members yet plans nothing, and does not say that it did.
func TestGenerationIsObservedOncePlanned(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	m.pod(0)
	b := m.pod(1)
	m.settle()
	require.Equal(t, metav1.ConditionTrue, m.ready().Status)
	m.lead()
	m.away[b.Spec.NodeName] = true
	m.size(3)
	require.NoError(t, m.round())
	m.push()
	require.Less(t, m.get().Status.ObservedGeneration, m.get().Generation)
	require.Less(t, m.ready().ObservedGeneration, m.get().Generation)
	clear(m.away)
	m.settle()
	require.Equal(t, m.get().Generation, m.ready().ObservedGeneration)
	require.Equal(t, metav1.ConditionFalse, m.ready().Status)
}
