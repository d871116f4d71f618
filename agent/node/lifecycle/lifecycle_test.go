package lifecycle

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	waiting  = State{Presence: Listed, Redirect: Self, Proxy: Waiting}
	serving  = State{Presence: Listed, Redirect: Self, Proxy: Deciding, Assigned: true}
	refused  = State{Presence: Listed, Redirect: Self, Proxy: Deciding}
	deleted  = State{Presence: Deleted, Redirect: Self, Proxy: Deciding, Assigned: true}
	draining = State{Presence: Listed, Redirect: Successor, Proxy: Deciding, Assigned: true}
	gone     = State{Presence: Gone}
)

// transitions is the table of the state machine.
var transitions = []struct {
	name    string
	from    State
	event   Event
	to      State
	effects []Effect
}{
	// Expected: the manager may hear of a pod first, and may be wrong about it.
	{"policy of an unseen pod", State{}, PolicySet, State{Assigned: true}, []Effect{Save}},
	{"unseen pod loses its policy", State{Assigned: true}, PolicyRemoved, gone, []Effect{Discard}},
	{"unseen pod is announced", State{Assigned: true}, Announcement, State{Presence: Announced, Assigned: true}, nil},
	{"unseen pod is listed", State{Assigned: true}, Listing, State{Presence: Listed, Assigned: true}, nil},
	{"unseen pod is absent", State{Assigned: true}, Absence, State{Assigned: true}, nil},
	{"unseen pod has no process", State{Assigned: true}, Exit, State{Assigned: true}, nil},
	{"unseen pod is never captured", State{Assigned: true}, Capture, State{Assigned: true}, nil},
	{"unseen pod when the agent resumes", State{Assigned: true}, Resumption, State{Assigned: true}, nil},

	// Sources of knowledge.
	{"restored pod has a policy", State{Presence: Restored}, PolicyRestored, State{Presence: Restored, Assigned: true}, nil},
	{"restored pod is announced", State{Presence: Restored}, Announcement, State{Presence: Announced}, nil},
	{"restored pod is listed", State{Presence: Restored}, Listing, State{Presence: Listed}, nil},
	{"restored pod was deleted meanwhile", State{Presence: Restored, Redirect: Self, Proxy: Deciding}, Absence, State{Presence: Deleted, Redirect: Self, Proxy: Deciding}, []Effect{RefuseDeleted, Save}},
	{"restored pod has exited meanwhile", State{Presence: Restored}, Exit, gone, []Effect{Release, Forget}},
	{"announced pod is listed", State{Presence: Announced}, Listing, State{Presence: Listed}, nil},
	{"announced pod is not listed in time", State{Presence: Announced, Redirect: Self, Proxy: Waiting}, Absence, State{Presence: Deleted, Redirect: Self, Proxy: Waiting}, []Effect{RefuseDeleted, Save}},
	{"listed pod is announced again", serving, Announcement, serving, nil},
	{"listed pod is listed again", serving, Listing, serving, nil},

	// Capture and policy, in either order.
	{"capture before the policy", State{Presence: Announced}, Capture, State{Presence: Announced, Redirect: Self, Proxy: Waiting}, []Effect{Save}},
	{"capture after the policy", State{Presence: Listed, Assigned: true}, Capture, State{Presence: Listed, Redirect: Self, Proxy: Waiting, Assigned: true}, []Effect{ApplyPolicy, Save}},
	{"capture of a deleted pod", State{Presence: Deleted, Assigned: true}, Capture, State{Presence: Deleted, Redirect: Self, Proxy: Waiting, Assigned: true}, []Effect{RefuseDeleted, Save}},
	{"first policy", waiting, PolicySet, State{Presence: Listed, Redirect: Self, Proxy: Waiting, Assigned: true}, []Effect{ApplyPolicy, Save}},
	{"first policy is applied", State{Presence: Listed, Redirect: Self, Proxy: Waiting, Assigned: true}, PolicyApplied, serving, nil},
	{"next policy", serving, PolicySet, serving, []Effect{ApplyPolicy, Save}},
	{"policy before the capture", State{Presence: Listed}, PolicySet, State{Presence: Listed, Assigned: true}, []Effect{Save}},
	{"policy removed", serving, PolicyRemoved, refused, []Effect{RefuseUnassigned, Save}},
	{"policy removed before it was applied", waiting, PolicyRemoved, waiting, []Effect{Save}},
	{"policy after a removal", refused, PolicySet, serving, []Effect{ApplyPolicy, Save}},

	// A pod that is deleted and runs on.
	{"deleted and runs on", serving, Absence, deleted, []Effect{RefuseDeleted, Save}},
	{"still runs", deleted, Absence, deleted, nil},
	{"a policy does not undo it", deleted, PolicySet, deleted, []Effect{RefuseDeleted, Save}},
	{"neither does the runtime", deleted, Announcement, deleted, nil},
	{"the list was stale", deleted, Listing, serving, []Effect{ApplyPolicy, Save}},
	{"its last process exits", deleted, Exit, gone, []Effect{Release, Forget}},
	{"deleted without a process", serving, Exit, gone, []Effect{Release, Forget}},

	// Sandboxes.
	{"the sandbox exits", serving, SandboxExit, State{Presence: Listed, Assigned: true}, []Effect{Release}},
	{"a sandbox that was not captured exits", State{Presence: Listed}, SandboxExit, State{Presence: Listed}, []Effect{Release}},
	{"capture of a captured pod", serving, Capture, serving, nil},

	// Takeover.
	{"a successor serves", serving, Takeover, draining, nil},
	{"a successor serves a waiting pod", waiting, Takeover, State{Presence: Listed, Redirect: Successor, Proxy: Waiting}, nil},
	{"policies still reach requests in flight", draining, PolicySet, draining, []Effect{ApplyPolicy, Save}},
	{"so do removals", draining, PolicyRemoved, State{Presence: Listed, Redirect: Successor, Proxy: Deciding}, []Effect{RefuseUnassigned, Save}},
	{"the sandbox is the successor's", draining, SandboxExit, draining, nil},
	{"the agent stops", serving, Stop, State{Presence: Listed, Assigned: true}, nil},
	{"the successor fails", serving, Resumption, serving, []Effect{RedirectEgress, Save}},
}

func TestTransitionsOfThePodLifecycle(t *testing.T) {
	for _, tt := range transitions {
		t.Run(tt.name, func(t *testing.T) {
			to, effects := tt.from.Next(tt.event)
			assert.Equal(t, tt.to, to)
			assert.Equal(t, tt.effects, effects)
		})
	}
}

// TestInvariantsHoldInEveryReachableState checks every transition of every state that can be reached.
func TestInvariantsHoldInEveryReachableState(t *testing.T) {
	reached := map[State]bool{}
	queue := []State{{}, {Presence: Restored}, {Presence: Announced}, {Presence: Listed}}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		if reached[s] || s.Presence == Gone {
			continue
		}
		reached[s] = true
		assert.False(t, s.Presence == Expected && (s.Redirect != Nobody || s.Proxy != None), "unseen and captured: %+v", s)
		assert.Equal(t, s.Redirect == Nobody, s.Proxy == None, "a proxy goes with a redirection: %+v", s)
		for e := PolicySet; e <= Resumption; e++ {
			next, effects := s.Next(e)
			check(t, s, e, next, effects)
			queue = append(queue, next)
		}
	}
	require.Greater(t, len(reached), 20)
}

func check(t *testing.T, s State, e Event, next State, effects []Effect) {
	t.Helper()
	what := fmt.Sprintf("%+v, event %d", s, e)
	applies := slices.Contains(effects, ApplyPolicy)
	refuses := slices.Contains(effects, RefuseDeleted) || slices.Contains(effects, RefuseUnassigned)
	assert.False(t, applies && refuses, what)
	assert.False(t, applies && next.Presence == Deleted, "a deleted pod acts: %s", what)
	assert.False(t, applies && !next.Assigned, "there is nothing to apply: %s", what)
	if applies || refuses {
		assert.NotEqual(t, None, next.Proxy, "no proxy to apply it: %s", what)
		assert.Equal(t, Save, effects[len(effects)-1], "the next agent does not know: %s", what)
	}
	ends := slices.Contains(effects, Forget) || slices.Contains(effects, Discard)
	assert.Equal(t, next.Presence == Gone, ends, what)
	if s.Redirect != Self {
		return
	}
	switch next.Redirect {
	case Nobody:
		assert.True(t, e == Stop || slices.Contains(effects, Release), what)
	case Self:
		assert.False(t, s.Proxy == Deciding && next.Proxy != Deciding, "requests wait again: %s", what)
	case Successor:
		assert.Equal(t, s.Proxy, next.Proxy, what)
	}
}
