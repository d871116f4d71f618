package trial

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// The page shows the last result of each operator, whichever run it is from.
func TestPageShowsLatestResults(t *testing.T) {
	c := &kube.Cluster{Root: t.TempDir()}
	latest, err := Latest(c)
	require.NoError(t, err)
	require.Empty(t, latest)

	for _, r := range []*Result{
		{Operator: "source-controller", Version: "v1", Divided: true, Sizes: []int32{2, 3}, AdoptionGapP99: 1500, Advice: &Advice{Verdict: "can be divided by namespace", Divide: []string{"a/b"}, Locks: []string{"a/c"}}},
		{Operator: "descheduler", Version: "v0.1", Problem: "adoption: no | leader"},
		{Operator: "descheduler", Version: "v0.2", Problem: "adoption: no | leader"},
	} {
		require.NoError(t, r.Save(c))
	}
	latest, err = Latest(c)
	require.NoError(t, err)
	require.Len(t, latest, 2)
	require.Equal(t, "descheduler", latest[0].Operator, "in the order of the catalogue")
	page := Page(latest)
	require.Contains(t, page, "| source-controller | v1 |")
	require.Contains(t, page, "| 2, 3 |")
	require.Contains(t, page, "| source-controller | can be divided by namespace | a/b | - | a/c | 0 |\n")
	require.Contains(t, page, "| 1.5s | 0 | works |")
	require.Contains(t, page, "| descheduler | v0.2 |")
	require.Contains(t, page, "adoption: no / leader |")
	require.NotContains(t, page, "| v0.1 |")
	for _, e := range Exclusions() {
		require.Contains(t, page, e.Name)
	}
}
