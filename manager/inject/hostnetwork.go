package inject

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// HostNetworkConfigMap is the ConfigMap, in the mesh's namespace, that says whether nodes can
// distinguish pods with hostNetwork. The leader writes what agents report, for all replicas.
const HostNetworkConfigMap = "ctrlmesh-host-network"

const (
	ableKey   = "able" // whether any node can; their number would change with every rollout
	reasonKey = "reason"
	// maxReasons bounds the nodes whose reasons are listed.
	maxReasons = 3
)

// HostNetwork returns the content of the ConfigMap: some node can, or none can, for the given
// reasons by node.
func HostNetwork(able bool, not map[string]string) map[string]string {
	if able {
		return map[string]string{ableKey: "true"}
	}
	var reasons []string
	for _, node := range slices.Sorted(maps.Keys(not)) {
		if len(reasons) == maxReasons {
			reasons = append(reasons, fmt.Sprintf("and %d more nodes", len(not)-maxReasons))
			break
		}
		reasons = append(reasons, "node "+node+": "+not[node])
	}
	return map[string]string{ableKey: "false", reasonKey: strings.Join(reasons, "; ")}
}

// KeepHostNetwork writes the ConfigMap.
func KeepHostNetwork(ctx context.Context, c client.Client, namespace string, data map[string]string) error {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: HostNetworkConfigMap}}
	_, err := controllerutil.CreateOrUpdate(ctx, c, cm, func() error {
		cm.Data = data
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing ConfigMap %s/%s: %w", namespace, HostNetworkConfigMap, err)
	}
	return nil
}

// hostNetwork refuses a pod with hostNetwork that no node could capture.
func (w *Webhook) hostNetwork(ctx context.Context, capture string) *admission.Response {
	const remedy = "remove hostNetwork from the pod template, or the label " + v1alpha1.EnableProxyLabel
	if capture != "" && capture != v1alpha1.CaptureEBPF {
		return new(refuse("HostNetwork", "a pod with hostNetwork shares its network with the node, so that only capture by %s can distinguish it, not %s: remove annotation %s from the pod template, or %s",
			v1alpha1.CaptureEBPF, capture, v1alpha1.CaptureAnnotation, remedy))
	}
	cm := &corev1.ConfigMap{}
	err := w.Reader.Get(ctx, types.NamespacedName{Namespace: w.Namespace, Name: HostNetworkConfigMap}, cm)
	if client.IgnoreNotFound(err) != nil {
		return new(admission.Errored(http.StatusInternalServerError, fmt.Errorf("reading ConfigMap %s: %w", HostNetworkConfigMap, err)))
	}
	if cm.Data[ableKey] == "true" {
		return nil
	}
	reason := cm.Data[reasonKey]
	if reason == "" {
		reason = "no agent is connected that could report it"
	}
	return new(refuse("HostNetwork", "a pod with hostNetwork shares its network with the node, and no node can distinguish its connections (%s): %s", reason, remedy))
}
