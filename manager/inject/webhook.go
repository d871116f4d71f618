package inject

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// Path at which Webhook is served.
const Path = "/mutate-pod"

// Webhook admits labelled pods as they are created. That label and trust stay as
// they were then is the business of a ValidatingAdmissionPolicy, which asks no
// manager.
type Webhook struct {
	// Reader reads without a cache: a ShardingConfig created a moment ago
	// counts, or its first pods would be let in to trust the real apiserver.
	Reader  client.Reader
	Bundles *Bundles
}

// Handle implements admission.Handler.
func (w *Webhook) Handle(ctx context.Context, req admission.Request) admission.Response {
	pod := &corev1.Pod{}
	if err := json.Unmarshal(req.Object.Raw, pod); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if !compile.Labelled(pod) {
		return admission.Allowed("")
	}
	return w.create(ctx, req, pod)
}

func (w *Webhook) create(ctx context.Context, req admission.Request, pod *corev1.Pod) admission.Response {
	if pod.Spec.HostNetwork {
		return refuse("HostNetwork", "a pod with hostNetwork shares its connections with the node, so that the mesh cannot tell them apart: remove hostNetwork from the pod template, or the label %s", v1alpha1.EnableProxyLabel)
	}
	var all v1alpha1.ShardingConfigList
	if err := w.Reader.List(ctx, &all, client.InNamespace(req.Namespace)); err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing ShardingConfigs: %w", err))
	}
	var selecting []string
	for _, c := range all.Items {
		sel, problem := compile.Members(&c)
		if problem != nil && problem.Reason == compile.ReasonInvalid {
			// It may be about this pod, which then must not run unsharded.
			return refuse("InvalidConfig", "whose shard this pod is cannot be told, because ShardingConfig %s is invalid (%s): mend or delete it", c.Name, problem.Message)
		}
		if sel != nil && sel.Matches(labels.Set(pod.Labels)) {
			selecting = append(selecting, c.Name)
		}
	}
	if len(selecting) > 1 {
		return refuse("Conflict", "%s", compile.ConflictMessage(req.Namespace, selecting))
	}
	trust := v1alpha1.TrustBoth
	if len(selecting) == 1 {
		trust = v1alpha1.TrustMesh
	}
	if req.DryRun == nil || !*req.DryRun {
		if err := w.Bundles.Ensure(ctx, req.Namespace, BundleOf(trust)); err != nil {
			return admission.Errored(http.StatusInternalServerError, err)
		}
	}
	return admission.Patched("", patch(pod, trust)...)
}

// patch touches what must change and nothing else, for a pod may have fields
// that this program does not know.
func patch(pod *corev1.Pod, trust string) []jsonpatch.JsonPatchOperation {
	var ops []jsonpatch.JsonPatchOperation
	bundle := BundleOf(trust)
	swap := func(name, format string, at ...any) {
		switch name {
		case bundle:
		case clusterBundle, MeshBundle, BothBundle:
			ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf(format, at...), bundle))
		}
	}
	for i, v := range pod.Spec.Volumes {
		if v.ConfigMap != nil {
			swap(v.ConfigMap.Name, "/spec/volumes/%d/configMap/name", i)
		}
		if v.Projected == nil {
			continue
		}
		for j, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				swap(s.ConfigMap.Name, "/spec/volumes/%d/projected/sources/%d/configMap/name", i, j)
			}
		}
	}
	switch {
	case pod.Annotations == nil:
		ops = append(ops, jsonpatch.NewOperation("add", "/metadata/annotations", map[string]string{v1alpha1.TrustAnnotation: trust}))
	case pod.Annotations[v1alpha1.TrustAnnotation] != trust:
		ops = append(ops, jsonpatch.NewOperation("add", "/metadata/annotations/"+escape(v1alpha1.TrustAnnotation), trust))
	}
	return ops
}

// escape renders a key for a JSON pointer.
func escape(key string) string {
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
}

func refuse(reason, format string, args ...any) admission.Response {
	metrics.AdmissionRefusals.WithLabelValues("pod", reason).Inc()
	return admission.Denied(fmt.Sprintf(format, args...))
}
