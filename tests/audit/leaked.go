package audit

import (
	"slices"
	"time"
)

// Leaked are the requests of which no access line tells.
func Leaked(requests []Request, lines []Access) []Request {
	known := make(map[string]bool, len(lines))
	for _, l := range lines {
		known[l.ID] = true
	}
	var out []Request
	for _, r := range requests {
		if !known[r.ID] {
			out = append(out, r)
		}
	}
	return out
}

// A request that an agent had in hand when it was killed was received at most this
// long before, and was not over, or its line not written, at most that long before.
const (
	inHand  = time.Second
	logging = 250 * time.Millisecond
)

// CutOff divides requests without an access line into those that leaked and those
// that an agent had in hand when it was killed, at any of the times: it had no
// chance to write a line.
func CutOff(requests []Request, kills []time.Time) (leaked, cut []Request) {
	for _, r := range requests {
		if slices.ContainsFunc(kills, r.inHandAt) {
			cut = append(cut, r)
		} else {
			leaked = append(leaked, r)
		}
	}
	return leaked, cut
}

func (r Request) inHandAt(kill time.Time) bool {
	return !r.Received.After(kill) && r.Received.After(kill.Add(-inHand)) &&
		(r.Ended.IsZero() || r.Ended.After(kill.Add(-logging)))
}
