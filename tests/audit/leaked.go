package audit

import (
	"slices"
	"time"
)

// Leaked returns the requests without an access line.
func Leaked(requests []Request, lines []Access) []Request {
	known := make(map[string]bool, len(lines))
	for _, l := range lines {
		known[l.ID] = true
	}
	return slices.DeleteFunc(slices.Clone(requests), func(r Request) bool { return known[r.ID] })
}

// A request may lack a line if it was received up to inHand before its agent was killed, and
// ended up to logging before that.
const (
	inHand  = 10 * time.Second
	logging = time.Second
	// The apiserver may receive an agent's last request this much later, on a busy machine.
	transit = 2 * time.Second
)

// CutOff divides requests without an access line into those that leaked and those that were
// in flight when their agent was killed, at any of the times, so that it could not write a
// line. Agents write the line of a watch before they send it, so a kill never excuses a
// watch. A request received after the kill is excused only if its client knows that it sent
// it to the mesh.
func CutOff(requests []Request, kills []time.Time, toTheMesh func(id string) bool) (leaked, cut []Request) {
	for _, r := range requests {
		near := func(kill time.Time) bool { return r.inHandAt(kill, toTheMesh(r.ID)) }
		if slices.ContainsFunc(kills, near) {
			cut = append(cut, r)
		} else {
			leaked = append(leaked, r)
		}
	}
	return leaked, cut
}

func (r Request) inHandAt(kill time.Time, toTheMesh bool) bool {
	latest := kill
	if toTheMesh {
		latest = kill.Add(transit)
	}
	return r.Verb != "watch" && r.Received.After(kill.Add(-inHand)) && !r.Received.After(latest) && (r.Ended.IsZero() || r.Ended.After(kill.Add(-logging)))
}
