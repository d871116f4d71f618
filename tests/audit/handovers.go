package audit

import (
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/scope"
)

// Handover is a move of keys that was settled.
type Handover struct {
	From, To string
	// Began is when it was first written down, Settled when it was struck out.
	Began, Settled time.Time
}

// Took is the time from its beginning to its end.
func (h Handover) Took() time.Duration { return h.Settled.Sub(h.Began) }

// Handovers are the moves from one shard to another that states tell of. A move that
// was called off, because its keys are to go elsewhere by now, is none.
func Handovers(states []State) []Handover {
	type move struct {
		Handover
		keys scope.Scope
	}
	var out []Handover
	open := map[string]move{}
	for _, s := range states {
		under := map[string]move{}
		for _, h := range s.Root.Handovers {
			if h.From == "" || h.To == "" {
				continue
			}
			id := strings.Join(append([]string{h.From, h.To}, h.Keys...), " ")
			m, ok := open[id]
			if !ok {
				keys, err := scope.Parse(h.Keys)
				if err != nil { // it says nothing that could be counted
					continue
				}
				m = move{Handover{From: h.From, To: h.To, Began: s.Received}, keys}
			}
			under[id] = m
		}
		for id, m := range open {
			if _, still := under[id]; still || !m.keys.Minus(s.held[m.To]).Empty() {
				continue
			}
			m.Settled = s.Ended
			out = append(out, m.Handover)
		}
		open = under
	}
	return out
}
