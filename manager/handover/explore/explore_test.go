package explore

import (
	"flag"
	"testing"

	"github.com/stretchr/testify/require"
)

var long = flag.Bool("long", false, "explore larger worlds, for minutes")

func TestExplore(t *testing.T) {
	worlds := Quick()
	if *long {
		worlds = Long()
	}
	r, err := Run(worlds...)
	require.NoError(t, err)
	t.Log(r)
	require.Empty(t, r.Violation)
	require.Equal(t, !*long, r.Whole)
	require.Greater(t, r.States, 40_000)
}

// Every mistake that the mechanism guards against is found out.
func TestFlaws(t *testing.T) {
	for name, flaws := range map[string]Flaws{
		"early grant":   {EarlyGrant: true},
		"no floor":      {NoFloor: true},
		"unbarred gone": {UnbarredGone: true},
		"early ack":     {EarlyAck: true},
		"undrained ack": {UndrainedAck: true},
		"serial reset":  {SerialReset: true},
		"blind write":   {BlindWrite: true},
		"gone unproven": {GoneUnproven: true},
	} {
		t.Run(name, func(t *testing.T) {
			worlds := Quick()
			for i := range worlds {
				worlds[i].Flaws = flaws
			}
			r, err := Run(worlds...)
			require.NoError(t, err)
			require.NotEmpty(t, r.Violation, "%s: not found out", r)
			t.Log(r, r.Violation)
		})
	}
}
