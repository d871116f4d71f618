// Package inject admits labelled pods, and those that VirtualApps select: it
// decides whom their clients will trust and, for those captured by address,
// whom they will talk to.
//
// Every projected volume of a pod gets the mesh's bundle in place of the
// cluster's CA. A member of a shard gets the mesh CA alone, so that without the
// proxy TLS itself refuses the apiserver; a pod that may be let go past the proxy
// gets both. The bundles are ConfigMaps in the pod's namespace, made before the
// pod is let in and kept right by the leader.
package inject

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/patch"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// Path at which Webhook is served.
const Path = "/mutate-pod"

// Webhook admits the pods of the mesh as they are created. A ValidatingAdmissionPolicy, which
// needs no manager, keeps their label, trust and capture mode from changing later.
type Webhook struct {
	// Reader reads without a cache. Otherwise the first pods of a new ShardingConfig could be
	// admitted to trust the real apiserver.
	Reader  client.Reader
	Bundles *Bundles
	// Namespace of the mesh.
	Namespace string
	// Permits reports whether agents' certificates may name an address.
	Permits func(context.Context, netip.Addr) bool
	// Hosts returns by what clients reach the apiserver beside its Service.
	Hosts func() []string
}

// Handle implements admission.Handler.
func (w *Webhook) Handle(ctx context.Context, req admission.Request) admission.Response {
	pod := &corev1.Pod{}
	if err := json.Unmarshal(req.Object.Raw, pod); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	config, refused := w.config(ctx, req, pod)
	if refused != nil {
		return *refused
	}
	labelled := compile.Labelled(pod) || pod.Labels[kridge.EnableProxyLabel] == "true"
	if !labelled && (config == nil || origin.KindOf(config) != origin.VirtualApp) {
		return admission.Allowed("") // its VirtualApp was deleted
	}
	return w.create(ctx, req, pod, config)
}

// create admits a pod to the mesh, as a member of a configuration; nil for none.
func (w *Webhook) create(ctx context.Context, req admission.Request, pod *corev1.Pod, config *v1alpha1.ShardingConfig) admission.Response {
	capture := pod.Annotations[v1alpha1.CaptureAnnotation]
	switch capture {
	case "", v1alpha1.CaptureEBPF, v1alpha1.CaptureIPTables, v1alpha1.CaptureAddress:
	default:
		return refuse("Capture", "annotation %s: %q is no capture mode: write %s, %s or %s, or remove it to use the best one", v1alpha1.CaptureAnnotation, capture,
			v1alpha1.CaptureEBPF, v1alpha1.CaptureIPTables, v1alpha1.CaptureAddress)
	}
	if pod.Spec.OS != nil && pod.Spec.OS.Name != corev1.Linux {
		return refuse("OS", "a pod for %s cannot be captured, only those for %s: remove the label %s from the pod template", pod.Spec.OS.Name, corev1.Linux, v1alpha1.EnableProxyLabel)
	}
	if pod.Spec.HostNetwork {
		if refused := w.hostNetwork(ctx, capture); refused != nil {
			return *refused
		}
	}
	trusted := compile.Trust(config)
	bundle := BundleOf(trusted)
	annotations := map[string]string{v1alpha1.TrustAnnotation: trusted, v1alpha1.KubeconfigContentAnnotation: "", v1alpha1.EgressTrustAnnotation: ""}
	volumes, ops := swapBundles(pod.Spec.Volumes, bundle)
	ops = append(ops, swapVariables(pod, bundle)...)
	warnings := hazards(pod, capture, w.services(ctx, pod), w.Hosts())
	if capture == v1alpha1.CaptureAddress {
		if config != nil && compile.PassesThrough(config) {
			return refuse("Capture", "a pod that is captured by address cannot have its connections passed through, as clientCertificates: Passthrough of %s asks: remove annotation %s from the pod template", origin.Describe(config), v1alpha1.CaptureAnnotation)
		}
		agents, refused := w.agents(ctx)
		if refused != nil {
			return *refused
		}
		more, kubeconfig, replaced, err := toAddress(pod, volumes, req.Namespace, bundle, agents)
		if err != nil {
			return refuse("Capture", "this pod cannot be captured by address: %v", err)
		}
		ops, warnings = append(ops, more...), append(warnings, replaced...)
		annotations[v1alpha1.KubeconfigContentAnnotation] = kubeconfig
	}
	bundles := []string{bundle}
	if TrustsEgress(pod) {
		more, alone := trustEgress(pod, capture == v1alpha1.CaptureAddress)
		ops, warnings = append(ops, more...), append(warnings, alone...)
		bundles = append(bundles, EgressBundle)
		annotations[v1alpha1.EgressTrustAnnotation] = "true"
	}
	for _, name := range bundles {
		// The leader writes it into the namespace once it sees the pod.
		if _, err := w.Bundles.content(name); err != nil {
			return admission.Errored(http.StatusInternalServerError, err)
		}
	}
	// Agents and caches know one label.
	ops = append(ops, patch.Strings("/metadata/labels", pod.Labels, map[string]string{v1alpha1.EnableProxyLabel: "true"})...)
	return admission.Patched("", append(ops, patch.Strings("/metadata/annotations", pod.Annotations, annotations)...)...).WithWarnings(warnings...)
}

// config returns the configuration that selects a pod; nil if none does.
func (w *Webhook) config(ctx context.Context, req admission.Request, pod *corev1.Pod) (*v1alpha1.ShardingConfig, *admission.Response) {
	var all v1alpha1.ShardingConfigList
	if err := w.Reader.List(ctx, &all, client.InNamespace(req.Namespace)); err != nil {
		return nil, new(admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing ShardingConfigs: %w", err)))
	}
	var config *v1alpha1.ShardingConfig
	var selecting []string
	for _, c := range all.Items {
		selects, problem := compile.Selects(&c)
		if problem != nil {
			// It may be meant to select this pod, which then must not run unsharded.
			return nil, new(refuse("InvalidConfig", "the shard of this pod is unknown, because %s is invalid (%s): fix or delete it", origin.Describe(&c), problem.Message))
		}
		if selects(pod) {
			config, selecting = &c, append(selecting, origin.Among(&c))
		}
	}
	if len(selecting) > 1 {
		return nil, new(refuse("Conflict", "%s", compile.ConflictMessage(req.Namespace, selecting)))
	}
	return config, nil
}

// agents returns the address at which pods reach the agent of their node.
func (w *Webhook) agents(ctx context.Context) (netip.AddrPort, *admission.Response) {
	service := &corev1.Service{}
	err := w.Reader.Get(ctx, types.NamespacedName{Namespace: w.Namespace, Name: apiserver.AgentService}, service)
	if client.IgnoreNotFound(err) != nil {
		return netip.AddrPort{}, new(admission.Errored(http.StatusInternalServerError, fmt.Errorf("reading the agents' Service: %w", err)))
	}
	addresses := apiserver.Agents(service)
	if len(addresses) == 0 {
		return netip.AddrPort{}, new(refuse("Capture", "no pod can be captured by address, because the agents' Service %s/%s has no address: install the whole of the mesh, or remove annotation %s from the pod template", w.Namespace, apiserver.AgentService, v1alpha1.CaptureAnnotation))
	}
	if ip := addresses[0].Addr(); !w.Permits(ctx, ip) {
		return netip.AddrPort{}, new(refuse("Capture", "no pod can be captured by address yet, because the agents' certificates cannot name their Service's address %s while pods run that know an older CA of the mesh: annotation %s of Secret %s/%s says which to delete", ip, trust.RotationAnnotation, w.Namespace, trust.MeshCASecret))
	}
	return addresses[0], nil
}

// services returns the addresses of the apiserver's Service; nil where they do not matter, or are
// not known.
func (w *Webhook) services(ctx context.Context, pod *corev1.Pod) []netip.AddrPort {
	service := &corev1.Service{}
	if !mayPass(pod) || w.Reader.Get(ctx, types.NamespacedName{Namespace: apiserver.Namespace, Name: apiserver.Name}, service) != nil {
		return nil
	}
	return apiserver.Services(service)
}

// swapBundles replaces the bundle in all volumes that have one. The operations change nothing
// else, because a pod may have fields that this program does not know.
func swapBundles(in []corev1.Volume, bundle string) (volumes []corev1.Volume, ops []jsonpatch.JsonPatchOperation) {
	swap := func(name *string, format string, at ...any) {
		if isBundle(*name) && *name != bundle {
			*name = bundle
			ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf(format, at...), bundle))
		}
	}
	for i, v := range in {
		v = *v.DeepCopy()
		if v.ConfigMap != nil {
			swap(&v.ConfigMap.Name, "/spec/volumes/%d/configMap/name", i)
		}
		if v.Projected != nil {
			for j, s := range v.Projected.Sources {
				if s.ConfigMap != nil {
					swap(&s.ConfigMap.Name, "/spec/volumes/%d/projected/sources/%d/configMap/name", i, j)
				}
				if t := s.ClusterTrustBundle; t != nil && ptr.Deref(t.SignerName, "") == apiserverSigner {
					v.Projected.Sources[j] = corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{
						LocalObjectReference: corev1.LocalObjectReference{Name: bundle}, Items: []corev1.KeyToPath{{Key: bundleKey, Path: t.Path}},
					}}
					ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf("/spec/volumes/%d/projected/sources/%d", i, j), v.Projected.Sources[j]))
				}
			}
		}
		volumes = append(volumes, v)
	}
	return volumes, ops
}

// swapVariables replaces the bundle in all variables that are set from one.
func swapVariables(pod *corev1.Pod, bundle string) (ops []jsonpatch.JsonPatchOperation) {
	swap := func(name, format string, at ...any) {
		if isBundle(name) && name != bundle {
			ops = append(ops, jsonpatch.NewOperation("replace", fmt.Sprintf(format, at...), bundle))
		}
	}
	for at, c := range containersOf(pod) {
		for i, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				swap(e.ValueFrom.ConfigMapKeyRef.Name, "%s/env/%d/valueFrom/configMapKeyRef/name", at, i)
			}
		}
		for i, e := range c.EnvFrom {
			if e.ConfigMapRef != nil {
				swap(e.ConfigMapRef.Name, "%s/envFrom/%d/configMapRef/name", at, i)
			}
		}
	}
	return ops
}

// isBundle reports whether a ConfigMap has the CAs that verify the apiserver.
func isBundle(name string) bool {
	return name == clusterBundle || name == MeshBundle || name == BothBundle
}

func refuse(reason, format string, args ...any) admission.Response {
	metrics.AdmissionRefusals.WithLabelValues("pod", reason).Inc()
	return admission.Denied(fmt.Sprintf(format, args...))
}

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

// WriteConfigMap creates a ConfigMap, or replaces its data.
func WriteConfigMap(ctx context.Context, c client.Client, namespace, name string, data map[string]string) error {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	_, err := controllerutil.CreateOrUpdate(ctx, c, cm, func() error {
		cm.Data = data
		return nil
	})
	return failure.Wrap(err, "writing ConfigMap %s/%s", namespace, name)
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
	reason := cmp.Or(cm.Data[reasonKey], "no agent is connected that could report it")
	return new(refuse("HostNetwork", "a pod with hostNetwork shares its network with the node, and no node can distinguish its connections (%s): %s", reason, remedy))
}
