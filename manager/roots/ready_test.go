package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// A member in standby has applied the policy that it was sent, and owns nothing.
func TestReadyOnlyOncePoliciesAreApplied(t *testing.T) {
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
