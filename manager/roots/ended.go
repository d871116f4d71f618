package roots

import (
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// ended are the members that have ended by the word of others than their agent, by uid,
// and when this leader first saw that.
type ended map[string]time.Time

// observe notes which members have ended: those in a terminal phase, and those whose
// object and Node are deleted. The deletion of the object alone ends nothing: a pod that
// was deleted by force runs on, on a node that nobody may reach.
func (e *ended) observe(members map[string]handover.Member, v view, now time.Time) {
	next := ended{}
	for uid, m := range members {
		pod := v.all[uid]
		if pod != nil && !compile.Ended(pod) || pod == nil && v.world.Node(m.Node) {
			continue
		}
		next[uid] = now
		if since, known := (*e)[uid]; known {
			next[uid] = since
		}
	}
	*e = next
}

// over reports whether nothing of a member without agent takes effect any more: what it
// sent until it ended, or its agent fell silent, is past the apiserver's bound on requests.
func (e ended) over(uid string, silent time.Time, requestTimeout time.Duration, now time.Time) bool {
	since, ok := e[uid]
	if since.Before(silent) {
		since = silent
	}
	return ok && expired(since, requestTimeout, now)
}

// expired reports whether all requests that were sent by a moment are past the apiserver's
// bound on requests.
func expired(since time.Time, requestTimeout time.Duration, now time.Time) bool {
	return now.Sub(since) >= requestTimeout+meshv1.LostWrite
}
