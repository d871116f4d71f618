package activity

import (
	"net/http"
	"sync/atomic"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/metrics"
)

// Outcomes counts how the requests of one pod ended. Its zero value is ready to use, and it is
// safe for concurrent use.
type Outcomes struct {
	requests, errors, conflicts atomic.Uint64
	answered, latency           atomic.Uint64 // latency is in nanoseconds
	writes                      atomic.Uint64
}

// Count counts a request by the status code of its response. Codes that operators meet while they
// work as intended are no errors: an object does not exist, a list has expired, requests are too
// many.
func (o *Outcomes) Count(code int) {
	o.requests.Add(1)
	switch {
	case code == http.StatusConflict:
		o.conflicts.Add(1)
	case code < http.StatusBadRequest || code == http.StatusNotFound || code == http.StatusGone || code == http.StatusTooManyRequests || code == metrics.ClientGone:
	default:
		o.errors.Add(1)
	}
}

// Answered counts how long the apiserver took to answer a request.
func (o *Outcomes) Answered(after time.Duration) {
	o.answered.Add(1)
	o.latency.Add(uint64(max(after, 0)))
}

// Wrote counts a successful write of a resource that the policy divides.
func (o *Outcomes) Wrote() { o.writes.Add(1) }

// Report returns the counts.
func (o *Outcomes) Report() *meshv1.Outcomes {
	return &meshv1.Outcomes{
		Requests: o.requests.Load(), Errors: o.errors.Load(), Conflicts: o.conflicts.Load(),
		Answered: o.answered.Load(), LatencyMicros: o.latency.Load() / uint64(time.Microsecond),
		Writes: o.writes.Load(),
	}
}
