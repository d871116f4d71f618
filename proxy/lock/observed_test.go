package lock

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestObservedLocksAreBounded(t *testing.T) {
	var o Observations
	now := time.Now()
	for i := range 2 * maxObserved {
		o.Note(Observed{Namespace: "a", Name: fmt.Sprint(i), Resource: "leases"}, now)
	}
	require.Len(t, o.known, maxObserved)
	o.Note(Observed{Namespace: "a", Name: "written", Resource: "leases", Written: true}, now)
	require.Len(t, o.known, maxObserved)
	require.Equal(t, "written", o.known[0].Name, "instead of one that is only read")
	o.Note(Observed{Namespace: "a", Name: "late", Resource: "leases"}, now.Add(2*observedFor))
	require.Len(t, o.known, 1, "those that were not seen for long are forgotten")
}
