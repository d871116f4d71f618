package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/manager/locks"
)

// The agents have confirmed the policies of a new leader before it decides for the first time:
// they are the policies of its predecessor. So no pod seems to act for a lock that none demands.
func TestNewLeaderKeepsLocksBeforeItDecides(t *testing.T) {
	t.Parallel()
	m, _ := sharded(t, 2)
	m.lead()
	keep := func() {
		demands, ok := m.Demands()
		require.True(t, ok)
		_, err := m.keeper.Round(t.Context(), demands, func(types.NamespacedName) bool { return len(m.policies) > 0 }, noOverlap)
		require.NoError(t, err)
		m.now = m.now.Add(locks.Every)
	}
	require.NoError(t, m.Round(t.Context(), m.world())) // it reads the root
	keep()
	m.push()
	for range 3 {
		require.Len(t, m.acting(), 2)
		keep()
		require.Equal(t, "ctrlmesh:ns/op", m.holder("lock"))
	}
	m.goOn(time.Minute, nil)
	require.Len(t, m.owned(), 2)
}
