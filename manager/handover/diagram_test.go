package handover

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// transition is a change of the state of a key, as the diagram in docs/design.md draws it.
type transition struct{ from, to string }

// TestDesignShowsTheStatesOfAKey compares the diagram with what happens in the transcripts.
// TestProperties finds transitions that neither has.
func TestDesignShowsTheStatesOfAKey(t *testing.T) {
	played := map[transition]bool{}
	playTranscripts(t, func(before, after State) {
		for _, one := range transitions(before, after) {
			played[one] = true
		}
	})
	assert.Equal(t, drawn(t), played, "the transitions of the diagram in docs/design.md (expected) are not those of the transcripts (actual): draw them, or add a transcript")
}

// transitions returns those of some keys in a Step.
func transitions(before, after State) (out []transition) {
	for i := range 16 {
		key := uint64(i)<<60 | 1<<59
		if from, to := stateOf(before, key), stateOf(after, key); from != to {
			out = append(out, transition{from, to})
		}
	}
	return out
}

// stateOf returns the state of the keys in one place of the key space.
func stateOf(s State, key uint64) string {
	if s.RolledBack {
		return "Standby"
	}
	for _, m := range s.Moves {
		if m.Keys.OwnsHash(key) {
			return string(m.Phase)
		}
	}
	if s.owned().OwnsHash(key) {
		return "Settled"
	}
	return "Unowned"
}

// drawn returns the transitions of the diagram.
func drawn(t require.TestingT) map[transition]bool {
	page, err := os.ReadFile("../../docs/design.md")
	require.NoError(t, err)
	_, diagram, found := strings.Cut(string(page), "stateDiagram-v2\n")
	require.True(t, found, "docs/design.md has no diagram of states")
	diagram, _, _ = strings.Cut(diagram, "```")
	out := map[transition]bool{}
	for _, line := range regexp.MustCompile(`(?m)^ *(\w+) --> (\w+)`).FindAllStringSubmatch(diagram, -1) {
		out[transition{line[1], line[2]}] = true
	}
	return out
}
