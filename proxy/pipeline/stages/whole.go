package stages

import (
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// maxWhole bounds the responses that stages read before they pass on anything, in bytes.
const maxWhole = 4 * lock.MaxObject

// readWhole reads the body of a response about an object. If it cannot, the outcome says why.
func readWhole(x *pipeline.State, resp *upstream.Response, about string) ([]byte, *pipeline.Outcome) {
	body, err := x.Memory.ReadAll(resp.Body, maxWhole)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return nil, x.Plan.BadResponse(about, refused)
	}
	if err != nil {
		return nil, pipeline.Failure(err)
	}
	return body, nil
}
