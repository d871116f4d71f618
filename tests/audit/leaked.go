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

// How long before an agent was killed a request may have been received, and how long
// before it may have been over without its line being written.
const (
	inHand  = 10 * time.Second
	logging = time.Second
	// What an agent sent with its last breath is received a moment later, and by
	// nobody's fault but a busy processor's.
	lastBreath = 2 * time.Second
)

// CutOff divides requests without an access line into those that leaked and those
// that an agent had in hand when it was killed, at any of the times: it had no
// chance to write a line. Of a watch it writes one before it sends it, so that no kill
// excuses a watch without a line. What was received after that is taken for one of the
// latter only if its client knows that it sent it to the mesh.
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
		latest = kill.Add(lastBreath)
	}
	return r.Verb != "watch" && r.Received.After(kill.Add(-inHand)) && !r.Received.After(latest) && (r.Ended.IsZero() || r.Ended.After(kill.Add(-logging)))
}
