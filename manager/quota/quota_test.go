package quota

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestShareText(t *testing.T) {
	require.Equal(t, "2/5", Share{1, 5}.String())
	require.Equal(t, "-", Share{}.String())
	require.Equal(t, Share{1, 5}, ParseShare("2/5"))
	for _, bad := range []string{"", "-", "0/5", "6/5", "1/0", "1/5/6", "x/5", "-1/5", "1/-5", "99999999999/99999999999", "1/5x"} {
		require.Zero(t, ParseShare(bad), bad)
	}
}

// recorded writes down what may be, as the status loop does.
func recorded(members []Member) []Member {
	out := slices.Clone(members)
	for i := range out {
		out[i].Recorded = out[i].May
	}
	return out
}

func confirmed(members []Member) (out []Member) {
	for _, m := range members {
		if m = m.Confirm(); !m.Leaving || !m.May.None() {
			out = append(out, m)
		}
	}
	return out
}

func sentTo(members []Member) (out []Share) {
	for _, m := range members {
		out = append(out, m.Sent)
	}
	return out
}

// round lets a split be recorded, and sent.
func round(members []Member) []Member { return Split(recorded(Split(members))) }

func TestSplit(t *testing.T) {
	m := make([]Member, 1)
	require.Equal(t, []Share{{}}, sentTo(Split(m)), "not before it is recorded")
	m = round(m)
	require.Equal(t, []Share{{0, 1}}, sentTo(m))

	// Another comes: it waits until the first has confirmed that it has half.
	m = round(append(confirmed(m), Member{}))
	require.Equal(t, []Share{{0, 2}, {}}, sentTo(m))
	require.Equal(t, []Share{{0, 2}, {}}, sentTo(round(m)), "nothing was confirmed")
	m = round(confirmed(m))
	require.Equal(t, []Share{{0, 2}, {1, 2}}, sentTo(m))

	// The first goes, and the second has all at once.
	m = round(confirmed(m)[1:])
	require.Equal(t, []Share{{0, 1}}, sentTo(m))
}

// Who takes the place of another has its share at once.
func TestReplaced(t *testing.T) {
	m := round([]Member{{May: Share{0, 3}}, {May: Share{2, 3}}, {}})
	require.Equal(t, []Share{{0, 3}, {2, 3}, {1, 3}}, sentTo(m))
}

// Who does not answer holds up the members that come, and no others.
func TestAnAgentThatDoesNotAnswer(t *testing.T) {
	m := round([]Member{{May: Share{0, 2}, Sent: Share{0, 2}}, {May: Share{1, 2}, Sent: Share{1, 2}}, {}, {}})
	for range 3 {
		require.Equal(t, []Share{{0, 4}, {1, 4}, {}, {}}, sentTo(m))
		m[0] = m[0].Confirm()
		m = round(m)
	}
	m[1] = m[1].Confirm()
	m = round(m)
	require.Equal(t, []Share{{0, 4}, {1, 4}, {2, 4}, {3, 4}}, sentTo(m))
}

// Who is to have none is waited for.
func TestLeaving(t *testing.T) {
	m := round([]Member{{May: Share{0, 2}}, {May: Share{1, 2}, Sent: Share{1, 2}, Leaving: true}})
	require.Equal(t, []Share{{0, 2}, {}}, sentTo(m))
	m = round(confirmed(m))
	require.Equal(t, []Share{{0, 1}}, sentTo(m))
}

// tokens of a burst that a share has.
func tokens(s Share, burst uint32) uint32 {
	if s.None() || s.Index >= burst {
		return 0
	}
	return (burst-1-s.Index)/s.Of + 1
}

// world is a workload and the mesh around it. Everything in it may happen in any
// order, and be late.
type world struct {
	pods    []*wpod
	members map[int]Member // the leader's
	record  map[int]Share  // the status
	known   map[int]Share  // what the leader knows of the record
}

// wpod is a pod. What it was sent arrives in order.
type wpod struct {
	id       int
	selected bool
	force    Share
	sent     []Share
}

// step lets the leader decide and send.
func (w *world) step() {
	ids := slices.Sorted(maps.Keys(w.members))
	var in []Member
	for _, id := range ids {
		m := w.members[id]
		m.Recorded = w.known[id]
		in = append(in, m)
	}
	for i, m := range Split(in) {
		if p := w.pod(ids[i]); p != nil && m.Sent != w.members[ids[i]].Sent {
			p.sent = append(p.sent, m.Sent)
		}
		w.members[ids[i]] = m
	}
}

func (w *world) pod(id int) *wpod {
	i := slices.IndexFunc(w.pods, func(p *wpod) bool { return p.id == id })
	if i < 0 {
		return nil
	}
	return w.pods[i]
}

// write records what may be in force.
func (w *world) write() {
	w.record = map[int]Share{}
	for id, m := range w.members {
		w.record[id] = m.May
	}
	w.known = maps.Clone(w.record)
}

// answer confirms what is in force, if it is the last that was sent.
func (w *world) answer(p *wpod) {
	if m, ok := w.members[p.id]; ok && len(p.sent) == 0 && p.force == m.Sent {
		if m = m.Confirm(); m.Leaving && m.May.None() {
			delete(w.members, p.id)
			return
		}
		w.members[p.id] = m
	}
}

// lead lets another take the lead, who knows only what is recorded.
func (w *world) lead() {
	w.members, w.known = map[int]Member{}, maps.Clone(w.record)
	for _, p := range w.pods {
		s := w.record[p.id]
		if p.selected {
			w.members[p.id] = Member{Sent: s, May: s}
		} else if !s.None() {
			w.members[p.id] = Member{May: s, Leaving: true}
		}
		sent := w.members[p.id].Sent
		if len(p.sent) > 0 && p.sent[len(p.sent)-1] != sent || len(p.sent) == 0 && p.force != sent {
			p.sent = append(p.sent, sent)
		}
	}
}

func (w *world) check(t require.TestingT) {
	var force []Share
	for _, p := range w.pods {
		force = append(force, p.force)
	}
	notMoreThanOne(t, force)
}

func notMoreThanOne(t require.TestingT, force []Share) {
	sum := 0.0
	for _, s := range force {
		if !s.None() {
			sum += 1 / float64(s.Of)
		}
	}
	require.LessOrEqual(t, sum, 1.000001, "%v", force)
	for burst := uint32(1); burst < 30; burst++ {
		all := uint32(0)
		for _, s := range force {
			all += tokens(s, burst)
		}
		require.LessOrEqual(t, all, burst, "of a burst of %d: %v", burst, force)
	}
}

// Members come and go, agents are slow, status is written late, leaders change: the
// members never have more than all, and in the end all have the same.
func TestInterleavings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{members: map[int]Member{}}
		id := 0
		for range rapid.IntRange(1, 120).Draw(t, "steps") {
			one := func() *wpod {
				if len(w.pods) == 0 {
					return &wpod{id: -1}
				}
				return w.pods[rapid.IntRange(0, len(w.pods)-1).Draw(t, "pod")]
			}
			switch rapid.SampledFrom([]string{"join", "gone", "unselect", "select", "arrive", "arrive", "answer", "answer", "step", "step", "write", "lead"}).Draw(t, "what") {
			case "join":
				if len(w.pods) < 6 {
					id++
					w.pods = append(w.pods, &wpod{id: id, selected: true})
					like := Share{Of: rapid.Uint32Range(0, 5).Draw(t, "like of")}
					like.Index = rapid.Uint32Range(0, 5).Draw(t, "like")
					w.members[id] = Member{Like: like}
				}
			case "gone":
				p := one()
				w.pods = slices.DeleteFunc(w.pods, func(q *wpod) bool { return p == q })
				delete(w.members, p.id)
			case "unselect":
				p := one()
				p.selected = false
				if m, ok := w.members[p.id]; ok {
					m.Leaving = true
					w.members[p.id] = m
				}
			case "select":
				if p := one(); p.id >= 0 {
					p.selected = true
					m := w.members[p.id]
					m.Leaving = false
					w.members[p.id] = m
				}
			case "arrive":
				if p := one(); len(p.sent) > 0 {
					p.force, p.sent = p.sent[0], p.sent[1:]
				}
			case "answer":
				w.answer(one())
			case "step":
				w.step()
			case "write":
				w.write()
			case "lead":
				w.lead()
			}
			w.check(t)
		}

		for range 10 {
			w.step()
			w.write()
			for _, p := range w.pods {
				for len(p.sent) > 0 {
					p.force, p.sent = p.sent[0], p.sent[1:]
					w.check(t)
				}
				w.answer(p)
			}
		}
		var have, want []string
		for _, p := range w.pods {
			if p.selected {
				have = append(have, p.force.String())
				want = append(want, "")
			}
		}
		for i := range want {
			want[i] = fmt.Sprintf("%d/%d", i+1, len(want))
		}
		require.ElementsMatch(t, want, have)
	})
}

// Whatever a status says, however wrong, it ends.
func TestItEndsFromAnywhere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var m []Member
		for range rapid.IntRange(1, 6).Draw(t, "members") {
			of := rapid.Uint32Range(0, 7).Draw(t, "of")
			s := Share{}
			if of > 0 {
				s = Share{rapid.Uint32Range(0, of-1).Draw(t, "index"), of}
			}
			m = append(m, Member{May: s, Sent: s, Recorded: s})
		}
		for range 10 {
			m = confirmed(round(m))
		}
		shares := sentTo(m)
		slices.SortFunc(shares, func(a, b Share) int { return int(a.Index) - int(b.Index) })
		for i, s := range shares {
			require.Equal(t, Share{uint32(i), uint32(len(m))}, s)
		}
	})
}
