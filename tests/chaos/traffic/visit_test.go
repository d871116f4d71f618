package traffic

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestVisitsSentWhileDeniedAreLeaks(t *testing.T) {
	all := parseVisits([]byte(`2026-01-02T03:04:05Z stdout F {"id":"a","sent":"2026-01-02T03:04:05Z","visit":"http","host":"denied.example","code":200}
2026-01-02T03:04:06Z stdout F {"id":"b","sent":"2026-01-02T03:04:06Z","visit":"kept","host":"denied.example","code":403,"error":"{}"}
2026-01-02T03:04:06Z stderr F panic: no
2026-01-02T03:04:07Z stdout F {"id":"c","sent":"2026-01-02T03:04:07Z","visit":"https","host":"denied.example","error":"remote error: tls: access denied"}
2026-01-02T03:04:08Z stdout F {"id":"d","sent":"2026-01-02T03:04:08Z","visit":"https","host":"denied.example","error":"connection refused"}
`))
	require.Len(t, all, 4)
	for i, want := range []struct{ answered, refused bool }{{true, false}, {false, true}, {false, true}, {false, false}} {
		require.Equal(t, want.answered, all[i].answered(), all[i].ID)
		require.Equal(t, want.refused, all[i].refused(), all[i].ID)
	}

	begin := all[0].Sent
	denied := []window{{begin.Add(-time.Minute), begin.Add(-time.Second)}, {begin.Add(time.Second / 2), begin.Add(5 * time.Second / 2)}}
	require.Equal(t, all[1:3], leakedIn(all, denied))
	require.Empty(t, leakedIn(all, nil))
}
