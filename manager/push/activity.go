package push

import (
	"k8s.io/apimachinery/pkg/util/validation"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

// maxWrites bounds a reported number of writes or requests, so that sums of them do not overflow.
const maxWrites = 1 << 40

// outcomes returns the reported outcomes of a pod's requests, bounded.
func outcomes(reported *meshv1.Outcomes) Outcomes {
	requests := min(reported.GetRequests(), maxWrites)
	return Outcomes{Requests: requests, Errors: min(reported.GetErrors(), requests), Conflicts: min(reported.GetConflicts(), requests)}
}

// activity returns the reported activity of a pod, bounded. It omits resources with names that
// no resource can have.
func activity(reported []*meshv1.ResourceActivity) (out []*meshv1.ResourceActivity) {
	for _, a := range reported[:min(len(reported), 2*meshv1.MaxActivity)] {
		if a.GetGroup() != "" && len(validation.IsDNS1123Subdomain(a.GetGroup())) > 0 || len(validation.IsDNS1123Label(a.GetResource())) > 0 {
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
