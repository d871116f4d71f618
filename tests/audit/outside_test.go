package audit

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOutsideWritesWhileOwned checks when a pod outside the mesh may write.
func TestOutsideWritesWhileOwned(t *testing.T) {
	all := states(t,
		wrote(t, 1, 100, 110, nil, "a:x"),
		wrote(t, 2, 200, 210, nil, "a:"),
		wrote(t, 3, 300, 310, nil, "b:x"),
	)
	for _, c := range []struct {
		name            string
		namespace       string
		received, ended int
		outside         bool
	}{
		{"before the first grant", "x", 50, 105, false},
		{"across the first grant", "x", 50, 120, true},
		{"while it is owned", "x", 150, 160, true},
		{"across the release", "x", 190, 250, true},
		{"between release and grant", "x", 200, 305, false},
		{"while it is owned again, without an end", "x", 400, 0, true},
		{"in a namespace that no shard owns", "y", 150, 160, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Len(t, Outside(all, []Request{write("outsider", c.namespace, c.received, c.ended)}), map[bool]int{true: 1, false: 0}[c.outside])
		})
	}
}

// TestForeignWritesBesideAnOwner checks that a pod in no shard any more may write what none owns.
func TestForeignWritesBesideAnOwner(t *testing.T) {
	all := states(t,
		wrote(t, 1, 100, 110, nil, "a:x", "b:y"),
		wrote(t, 2, 200, 210, nil, "a:", "b:"),
		wrote(t, 3, 300, 310, nil, "a:", "b:x,y"),
	)
	for _, c := range []struct {
		name   string
		write  Request
		beside bool
	}{
		{"while nobody owns it", write("a", "x", 220, 230), false},
		{"across its own release", write("a", "x", 190, 220), false},
		{"across the grant of another", write("a", "x", 290, 320), true},
		{"while another owns it", write("a", "x", 320, 330), true},
		{"without an end", write("b", "x", 150, 0), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := Check(all, []Request{c.write}, nil)
			require.Len(t, j.Foreign, 1)
			require.Len(t, Beside(all, j.Foreign), map[bool]int{true: 1, false: 0}[c.beside])
		})
	}
}

// TestTurnsNeedAGrant checks that shards write in one namespace only in turns.
func TestTurnsNeedAGrant(t *testing.T) {
	all := states(t,
		wrote(t, 1, 100, 110, nil, "a:x", "b:y"),
		wrote(t, 2, 200, 210, nil, "a:", "b:x,y"),
		wrote(t, 3, 300, 310, nil, "a:x", "b:y"),
	)
	for _, c := range []struct {
		name   string
		writes []Request
		wrong  int
	}{
		{"one after the other", []Request{write("a", "x", 120, 130), write("b", "x", 220, 230), write("a", "x", 320, 330)}, 0},
		{"the earlier had not ended", []Request{write("a", "x", 120, 215), write("b", "x", 220, 230)}, 1},
		{"back without a grant", []Request{write("a", "x", 120, 130), write("b", "x", 220, 230), write("a", "x", 240, 250)}, 1},
		{"other namespaces", []Request{write("a", "x", 120, 130), write("b", "y", 125, 126), write("a", "x", 140, 150)}, 0},
		{"a pod of no shard", []Request{write("a", "x", 120, 130), write("nobody", "x", 125, 126)}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Len(t, Turns(all, c.writes), c.wrong)
		})
	}
}
