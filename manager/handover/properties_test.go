package handover

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Whatever happens, in whatever order and however often.
func TestProperties(t *testing.T) {
	drawn := drawn(t)
	rapid.Check(t, func(t *rapid.T) {
		var s State
		for i := range rapid.IntRange(1, 40).Draw(t, "events") {
			e, now := drawEvent(t), time.UnixMilli(int64(i))
			if rapid.IntRange(0, 9).Draw(t, "read anew") == 0 {
				s.Evidence = Evidence{}
			}
			s.Evidence.OthersIdle = rapid.Bool().Draw(t, "others idle")
			s.Evidence.LocksHeld = rapid.Bool().Draw(t, "locks held")
			before, copied := s, clone(s)
			next, _ := Step(s, e, now)
			require.Equal(t, copied, before, "Step changed what it was given: %#v", e)
			for _, one := range transitions(s, next) {
				require.Contains(t, drawn, one, "docs/design.md does not draw this transition: draw it, and add a transcript")
			}

			var all sharding.Scope
			for name, shard := range next.Shards {
				require.False(t, all.Overlaps(shard.Owned), "%s holds what another holds", name)
				all = sharding.Union(all, shard.Owned)
				old, ok := s.Shards[name]
				require.GreaterOrEqual(t, shard.Serial, old.Serial)
				if ok && !shard.Sent().Equal(old.Sent()) {
					require.Greater(t, shard.Serial, old.Serial, "%s is sent a new policy", name)
				}
				// Nothing is taken from a shard while a member may act on it.
				if taken := old.Owned.Minus(shard.Owned); !taken.Empty() {
					for _, m := range next.members(func(m Member) bool { return m.Shard == name }) {
						require.GreaterOrEqual(t, m.Serial, old.Serial)
						require.False(t, taken.Overlaps(old.Sent()), "%s was sent what is taken", m.UID)
					}
				}
			}
			for uid, m := range next.Members {
				require.LessOrEqual(t, m.Serial, next.Shards[m.Shard].Serial)
				if old, ok := s.Members[uid]; ok {
					require.Equal(t, old.Shard, m.Shard)
					require.GreaterOrEqual(t, m.Serial, old.Serial)
				}
			}
			for _, m := range next.Moves {
				require.True(t, len(next.Laggards(m)) > 0 || !next.Evidence.OthersConfirmed, "%v waits for nobody", m)
			}

			again, effects := Step(next, e, now)
			if _, ok := e.(Want); ok && !equal(next, again) {
				// The keys of a shard without members were released in the first Step. Until then
				// they were pinned. Who wants something repeats it.
				next = again
				again, effects = Step(next, e, now)
			}
			if !early(s, e) {
				require.True(t, equal(next, again), "again: %#v\n%#v", next, again)
				for _, e := range effects {
					t.Fatalf("%#v the second time", e)
				}
			}
			s = next
		}

		// Everybody is ready and answers: it ends.
		var want Want
		want.Scopes, want.Ready = map[string]sharding.Scope{"a": cells(0, 7), "b": cells(8, 15)}, map[string]bool{"a": true, "b": true}
		now := time.UnixMilli(1000)
		s.Evidence.OthersIdle, s.Evidence.LocksHeld = true, true
		for range 10 {
			s, _ = Step(s, want, now)
			for uid, m := range s.Members {
				s, _ = Step(s, Applied{UID: uid, Serial: s.Shards[m.Shard].Serial}, now)
			}
		}
		require.Empty(t, s.Moves)
		for name, shard := range s.Shards {
			require.True(t, shard.Owned.Equal(want.Scopes[name]), name)
		}
	})
}

// early reports whether an agent answers a serial that its pod was not sent yet. Such an answer
// is ignored, and counts once the shard has that serial.
func early(s State, e Event) bool {
	answered := func(uid string, serial int64) bool { return serial > s.Shards[s.Members[uid].Shard].Serial }
	switch e := e.(type) {
	case Applied:
		return answered(e.UID, e.Serial)
	case Refused:
		return answered(e.UID, e.Serial)
	}
	return false
}

func drawEvent(t *rapid.T) Event {
	shards := []string{"a", "b", "c", "d"}
	uid := fmt.Sprint(rapid.IntRange(0, 7).Draw(t, "pod"))
	serial := rapid.Int64Range(0, 60).Draw(t, "serial")
	switch rapid.SampledFrom([]string{"want", "want", "join", "applied", "applied", "applied", "gone", "refused", "outdated", "ahead", "barred"}).Draw(t, "event") {
	case "want":
		w := Want{Scopes: map[string]sharding.Scope{}, Ready: map[string]bool{}, Restart: rapid.Bool().Draw(t, "restart")}
		for i := range 16 {
			if n := rapid.IntRange(-1, len(shards)-1).Draw(t, "owner"); n >= 0 {
				w.Scopes[shards[n]] = sharding.Union(w.Scopes[shards[n]], cells(i, i))
			}
		}
		for _, name := range shards {
			w.Ready[name] = rapid.Bool().Draw(t, "ready")
		}
		return w
	case "join":
		return Join{[]Member{{UID: uid, Name: uid, Shard: rapid.SampledFrom(shards).Draw(t, "shard")}}}
	case "applied":
		return Applied{UID: uid, Serial: serial, Refused: rapid.Bool().Draw(t, "refused")}
	case "gone":
		return Gone{UID: uid}
	case "refused":
		return Refused{UID: uid, Serial: serial}
	case "ahead":
		return Ahead{UID: uid, Serial: serial}
	case "barred":
		return Barred{UID: uid, Serial: serial}
	}
	return Outdated{UID: uid}
}

func clone(s State) State {
	s.Shards, s.Members, s.Moves = maps.Clone(s.Shards), maps.Clone(s.Members), slices.Clone(s.Moves)
	s.Evidence.Confirmed, s.Evidence.Verified = maps.Clone(s.Evidence.Confirmed), maps.Clone(s.Evidence.Verified)
	return s
}

func equal(a, b State) bool {
	return a.MinSerial == b.MinSerial && a.RolledBack == b.RolledBack && reflect.DeepEqual(a.Evidence, b.Evidence) && maps.EqualFunc(a.Shards, b.Shards, func(x, y Shard) bool {
		return x.Serial == y.Serial && x.Owned.Equal(y.Owned) && x.Target.Equal(y.Target) && x.Wanted.Equal(y.Wanted)
	}) && maps.Equal(a.Members, b.Members) && slices.EqualFunc(a.Moves, b.Moves, func(x, y Move) bool {
		return x.Keys.Equal(y.Keys) && reflect.DeepEqual([]any{x.From, x.To, x.Phase, x.Began}, []any{y.From, y.To, y.Phase, y.Began})
	})
}
