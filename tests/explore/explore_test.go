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
	require.Greater(t, r.States, 40_000)
}

// Every mistake that the mechanism guards against is found out.
func TestFlaws(t *testing.T) {
	for name, c := range map[string]struct {
		worlds func() []Options
		flaws  Flaws
	}{
		"early grant":       {Handovers, Flaws{EarlyGrant: true}},
		"no floor":          {Handovers, Flaws{NoFloor: true}},
		"unbarred gone":     {Handovers, Flaws{UnbarredGone: true}},
		"early ack":         {Handovers, Flaws{EarlyAck: true}},
		"undrained ack":     {Handovers, Flaws{UndrainedAck: true}},
		"serial reset":      {Handovers, Flaws{SerialReset: true}},
		"blind write":       {Handovers, Flaws{BlindWrite: true}},
		"gone unproven":     {Handovers, Flaws{GoneUnproven: true}},
		"gone early":        {Handovers, Flaws{GoneEarly: true}},
		"forgotten writes":  {Handovers, Flaws{ForgottenWrites: true}},
		"serial alone":      {Restores, Flaws{SerialAlone: true}},
		"trusting":          {Restores, Flaws{Trusting: true}},
		"undetected":        {Restores, Flaws{Undetected: true}},
		"strangers ignored": {Restores, Flaws{StrangersIgnored: true}},
		"nothing required":  {Vanished, Flaws{NothingRequired: true}},
		"removed ignored":   {Vanished, Flaws{RemovedIgnored: true}},
		"lock by name":      {Adoptions, Flaws{LockByName: true}},
		"lock ignored":      {Adoptions, Flaws{LockIgnored: true}},
	} {
		t.Run(name, func(t *testing.T) {
			worlds := c.worlds()
			for i := range worlds {
				worlds[i].Flaws = c.flaws
			}
			r, err := Run(worlds...)
			require.NoError(t, err)
			require.NotEmpty(t, r.Violation, "%s: not found out", r)
			t.Log(r, r.Violation)
		})
	}
}
