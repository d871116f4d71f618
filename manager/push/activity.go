package push

import (
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/text"
)

const (
	// maxWrites bounds a reported number of writes or requests, so that sums of them do not overflow.
	maxWrites = 1 << 40
	// maxMicros bounds a reported duration likewise: 35 years.
	maxMicros = 1 << 50
)

// outcomes returns the reported outcomes of a pod's requests, bounded.
func outcomes(reported *meshv1.Outcomes) Outcomes {
	requests := min(reported.GetRequests(), maxWrites)
	return Outcomes{
		Requests: requests, Errors: min(reported.GetErrors(), requests), Conflicts: min(reported.GetConflicts(), requests),
		Answered: min(reported.GetAnswered(), requests), LatencyMicros: min(reported.GetLatencyMicros(), maxMicros),
		Writes: min(reported.GetWrites(), requests),
	}
}

// activity returns the reported activity of a pod, bounded. It omits resources with names that
// no resource can have.
func activity(reported []*meshv1.ResourceActivity) (out []*meshv1.ResourceActivity) {
	for _, a := range reported[:min(len(reported), 2*meshv1.MaxActivity)] {
		if !text.NamesResource(a.GetGroup(), a.GetResource()) {
			continue
		}
		writes := min(a.GetWrites(), maxWrites)
		out = append(out, &meshv1.ResourceActivity{
			Group: a.GetGroup(), Resource: a.GetResource(), Divided: a.GetDivided(), Watched: a.GetWatched(),
			Writes: writes, ForeignWrites: min(a.GetForeignWrites(), writes), Keys: sample.Merge(a.GetKeys()[:min(len(a.GetKeys()), sample.Size)]),
		})
	}
	return out
}
