package edits

import (
	"flag"
	"testing"

	"github.com/stretchr/testify/require"
)

var long = flag.Bool("long", false, "explore larger worlds, for minutes")

func TestEdits(t *testing.T) {
	worlds := Quick()
	if *long {
		worlds = Long()
	}
	states := 0
	for i, o := range worlds {
		r, err := Run(o)
		require.NoError(t, err)
		t.Logf("world %d: %d states", i, r.States)
		require.Empty(t, r.Violation)
		states += r.States
	}
	require.Greater(t, states, 100_000)
}

// Every mistake that the mechanism guards against is found.
func TestFlaws(t *testing.T) {
	for name, c := range map[string]struct {
		worlds func() []Options
		flaws  Flaws
	}{
		"lock at once":      {Locks, Flaws{LockAtOnce: true}},
		"resources at once": {ResourceEdits, Flaws{ResourcesAtOnce: true}},
		"key at once":       {ResourceEdits, Flaws{KeyAtOnce: true}},
		"dry run at once":   {DryRuns, Flaws{DryRunAtOnce: true}},
		"target at once":    {Targets, Flaws{TargetAtOnce: true}},
		"change owning":     {ResourceEdits, Flaws{ChangeOwning: true}},
		"change unquiet":    {DryRuns, Flaws{ChangeUnquiet: true}},
		"unknown granted":   {ResourceEdits, Flaws{UnknownGranted: true}},
		"unknown releases":  {ResourceEdits, Flaws{UnknownReleases: true}},
		"lock of spec":      {Locks, Flaws{LockOfSpec: true}},
		"orphan at once":    {Deletions, Flaws{OrphanAtOnce: true}},
		"undemanded":        {Locks, Flaws{Undemanded: true}},
		"lock unasked":      {DryRuns, Flaws{LockUnasked: true}},
		"outside ignored":   {Locks, Flaws{OutsideIgnored: true}},
		"one demand":        {Shared, Flaws{OneDemand: true}},
		"claim ignored":     {Shared, Flaws{ClaimIgnored: true}},
		"removed ignored":   {Deletions, Flaws{RemovedIgnored: true}},
		"refused releases":  {Shared, Flaws{RefusedReleases: true}},
		"deletion at once":  {Deletions, Flaws{DeletionAtOnce: true}},
	} {
		t.Run(name, func(t *testing.T) {
			worlds := c.worlds()
			for i := range worlds {
				worlds[i].Flaws = c.flaws
			}
			r, err := Run(worlds...)
			require.NoError(t, err)
			require.NotEmpty(t, r.Violation, "%d states: not found", r.States)
			t.Log(r.States, r.Violation)
		})
	}
}
