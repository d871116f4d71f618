package audit

import (
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Handover is a completed handover of keys.
type Handover struct {
	From, To string
	// Began is when the status first had it, Ended when the status no longer had it.
	Began, Ended time.Time
}

// Took returns the time from its beginning to its end.
func (h Handover) Took() time.Duration { return h.Ended.Sub(h.Began) }

// Handovers returns the handovers from one shard to another in the states. It skips those
// that were cancelled because their keys got another destination. Keys that join a handover
// later are part of it.
func Handovers(states []State) []Handover {
	type move struct {
		Handover
		keys sharding.Scope
	}
	var out []Handover
	var open []move
	for _, s := range states {
		under := map[int]bool{} // of open
		for _, h := range s.Root.Handovers {
			keys, err := sharding.Parse(h.Keys)
			if err != nil || h.From == "" || h.To == "" {
				continue
			}
			known := false
			for i, m := range open {
				if m.From == h.From && m.To == h.To && m.keys.Overlaps(keys) {
					known, under[i] = true, true
				}
			}
			if !known {
				under[len(open)] = true
				open = append(open, move{Handover{From: h.From, To: h.To, Began: s.Received}, keys})
			}
		}
		var still []move
		for i, m := range open {
			if under[i] {
				still = append(still, m)
			} else if m.keys.Overlaps(s.owned[m.To]) {
				m.Ended = s.Ended
				out = append(out, m.Handover)
			}
		}
		open = still
	}
	return out
}
