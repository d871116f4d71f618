package sysdump

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// source is one list of objects, and becomes one file.
type source struct {
	file string
	kind schema.GroupVersionKind
	// namespace is empty for objects of all namespaces, or without any.
	namespace string
	labels    client.MatchingLabels
	// keep selects objects; nil keeps all.
	keep func(*unstructured.Unstructured) bool
	// own: they are of the mesh, not of users.
	own bool
}

// sources returns what is collected of a mesh: kinds are those of the mesh that the apiserver serves, and
// operators the namespaces of its users.
func sources(mesh string, kinds []schema.GroupVersionKind, operators []string) (out []source) {
	core := func(kind string) schema.GroupVersionKind { return corev1.SchemeGroupVersion.WithKind(kind) }
	in := func(group, version, kind string) schema.GroupVersionKind {
		return schema.GroupVersionKind{Group: group, Version: version, Kind: kind}
	}
	const admission = "admissionregistration.k8s.io"
	for _, k := range kinds {
		out = append(out, source{file: "configuration/" + strings.ToLower(k.Kind) + "." + k.Group, kind: k})
	}
	for _, k := range []schema.GroupVersionKind{
		core("Pod"), core("Service"), core("Event"), core("ResourceQuota"), in("apps", "v1", "Deployment"), in("apps", "v1", "DaemonSet"),
		in("coordination.k8s.io", "v1", "Lease"), in("discovery.k8s.io", "v1", "EndpointSlice"), in("networking.k8s.io", "v1", "NetworkPolicy"),
	} {
		out = append(out, source{file: "mesh/" + strings.ToLower(k.Kind), kind: k, namespace: mesh, own: true})
	}
	out = append(out,
		source{file: "mesh/configmap", kind: core("ConfigMap"), namespace: mesh, own: true, keep: named("ctrlmesh")},
		source{file: "cluster/node", kind: core("Node")},
		source{file: "cluster/mutatingwebhookconfiguration", kind: in(admission, "v1", "MutatingWebhookConfiguration")},
		source{file: "cluster/validatingwebhookconfiguration", kind: in(admission, "v1", "ValidatingWebhookConfiguration")},
		source{file: "cluster/validatingadmissionpolicy", kind: in(admission, "v1", "ValidatingAdmissionPolicy"), keep: named("ctrlmesh")},
		source{file: "cluster/validatingadmissionpolicybinding", kind: in(admission, "v1", "ValidatingAdmissionPolicyBinding"), keep: named("ctrlmesh")},
		source{file: "cluster/customresourcedefinition", kind: in("apiextensions.k8s.io", "v1", "CustomResourceDefinition"), keep: ofTheMesh},
		source{file: "members/pod", kind: core("Pod"), labels: client.MatchingLabels{v1alpha1.EnableProxyLabel: "true"}},
	)
	for _, n := range operators {
		for _, k := range []schema.GroupVersionKind{core("Event"), in("apps", "v1", "Deployment"), in("apps", "v1", "StatefulSet"), in("coordination.k8s.io", "v1", "Lease")} {
			out = append(out, source{file: "operators/" + n + "/" + strings.ToLower(k.Kind), kind: k, namespace: n})
		}
	}
	return out
}

// named keeps objects whose names begin with a prefix.
func named(prefix string) func(*unstructured.Unstructured) bool {
	return func(o *unstructured.Unstructured) bool { return strings.HasPrefix(o.GetName(), prefix) }
}

// ofTheMesh keeps the definitions of kinds of the mesh.
func ofTheMesh(o *unstructured.Unstructured) bool {
	group, _, _ := unstructured.NestedString(o.Object, "spec", "group")
	return slices.Contains(snapshot.Groups, group)
}

// namespaces returns those of configurations and of labelled pods, sorted.
func namespaces(s *snapshot.Snapshot) []string {
	seen := map[string]bool{}
	for i := range s.Configs {
		seen[s.Configs[i].Namespace] = true
	}
	for i := range s.Pods {
		seen[s.Pods[i].Namespace] = true
	}
	return slices.Sorted(maps.Keys(seen))
}
