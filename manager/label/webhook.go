package label

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// Path at which Stamp is served.
const Path = "/stamp"

// Stamp is the admission handler that labels objects. It refuses nothing.
func Stamp(_ context.Context, req admission.Request) admission.Response {
	if req.Namespace == "" {
		return admission.Allowed("")
	}
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(req.Object.Raw, &object); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	want := Of(req.Namespace)
	if object.Labels == nil {
		metrics.StampedObjects.WithLabelValues("admission").Inc()
		return admission.Patched("", jsonpatch.NewOperation("add", "/metadata/labels", want))
	}
	var ops []jsonpatch.JsonPatchOperation
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if object.Labels[k] != want[k] {
			// "add" replaces a member that is there.
			ops = append(ops, jsonpatch.NewOperation("add", "/metadata/labels/"+strings.ReplaceAll(k, "/", "~1"), want[k]))
		}
	}
	if len(ops) > 0 {
		metrics.StampedObjects.WithLabelValues("admission").Inc()
	}
	return admission.Patched("", ops...)
}
