package label

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func TestVisitLabelsObjectsOfNamespaces(t *testing.T) {
	f, s := newSweep(t, 1200)
	f.objects["configmaps/ns-1/wrong"] = map[string]string{v1alpha1.NamespaceLabel: "ns-1", v1alpha1.ShardingHashLabel: "99", v1alpha1.ControlLabel: "true"}
	c := config("one", group([]string{""}, []string{"configmaps"}))
	s.Set([]*v1alpha1.ShardingConfig{c})
	s.served = served
	go s.visits(t.Context())
	s.Visit("ns-1", "mesh")
	require.Eventually(t, func() bool { return f.unstamped() == 801 }, 10*time.Second, time.Millisecond, "those of other namespaces, and the pod")
	f.mu.Lock()
	defer f.mu.Unlock()
	require.Equal(t, Of("ns-1"), f.objects["configmaps/ns-1/wrong"])
}
