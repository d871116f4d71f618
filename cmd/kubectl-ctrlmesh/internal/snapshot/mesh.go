package snapshot

import (
	"context"
	"errors"
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

// Programs reads the manager and the agents.
var Programs = Part{"the manager and the agents", func(ctx context.Context, r Reader, s *Snapshot) (err error) {
	m := &s.Mesh
	if m.Manager, err = get[appsv1.Deployment](ctx, r, r.Namespace, Manager); err != nil {
		return err
	}
	if m.Agents, err = get[appsv1.DaemonSet](ctx, r, r.Namespace, Agent); err != nil {
		return err
	}
	if m.Lease, err = get[coordinationv1.Lease](ctx, r, r.Namespace, Manager); err != nil {
		return err
	}
	return list(ctx, r, func(page corev1.PodList) {
		for _, pod := range page.Items {
			if name := pod.Labels[NameLabel]; (name == Manager || name == Agent) && !ended(&pod) {
				m.Pods = append(m.Pods, pod)
			}
		}
	}, client.InNamespace(r.Namespace))
}}

// Settings reads the administrator's settings.
var Settings = Part{"settings of the mesh", func(ctx context.Context, r Reader, s *Snapshot) (err error) {
	s.Mesh.Settings, err = get[corev1.ConfigMap](ctx, r, r.Namespace, platform.ConfigMap)
	return err
}}

// Limits reads what may keep pods of the mesh from being created, and the administrator's settings.
var Limits = Part{"quotas, Events and settings of the mesh", func(ctx context.Context, r Reader, s *Snapshot) error {
	if err := Settings.read(ctx, r, s); err != nil {
		return err
	}
	quotas := list(ctx, r, func(page corev1.ResourceQuotaList) { s.Mesh.Quotas = append(s.Mesh.Quotas, page.Items...) }, client.InNamespace(r.Namespace))
	failures := list(ctx, r, func(page corev1.EventList) {
		for _, e := range page.Items {
			if e.Reason == "FailedCreate" && !slices.Contains(s.Mesh.Failures, e.Message) {
				s.Mesh.Failures = append(s.Mesh.Failures, e.Message)
			}
		}
	}, client.InNamespace(r.Namespace))
	return errors.Join(quotas, failures)
}}

// Definitions reads CustomResourceDefinitions by their names.
func Definitions(names []string) Part {
	return Part{"CustomResourceDefinitions", func(ctx context.Context, r Reader, s *Snapshot) (err error) {
		s.Install.Definitions, err = collect[apiextensionsv1.CustomResourceDefinition](ctx, r, "", names)
		return err
	}}
}

// Admission reads webhook configurations and admission policies by their names.
func Admission(mutating, validating, policies []string) Part {
	return Part{"webhook configurations and admission policies", func(ctx context.Context, r Reader, s *Snapshot) (err error) {
		i := &s.Install
		if i.Mutating, err = collect[admissionv1.MutatingWebhookConfiguration](ctx, r, "", mutating); err != nil {
			return err
		}
		if i.Validating, err = collect[admissionv1.ValidatingWebhookConfiguration](ctx, r, "", validating); err != nil {
			return err
		}
		if i.Policies, err = collect[admissionv1.ValidatingAdmissionPolicy](ctx, r, "", policies); err != nil {
			return err
		}
		i.Bindings, err = collect[admissionv1.ValidatingAdmissionPolicyBinding](ctx, r, "", policies)
		return err
	}}
}

// Secrets are the names of those that the manager creates in its namespace.
var Secrets = []string{trust.MeshCASecret, trust.EgressCASecret, trust.ServingSecret}

// Keys reads the metadata of the Secrets with the keys of CAs. Their content stays at the apiserver.
var Keys = Part{"metadata of the Secrets of CAs", func(ctx context.Context, r Reader, s *Snapshot) error {
	s.Install.Secrets = map[string]bool{}
	for _, name := range Secrets {
		secret := &metav1.PartialObjectMetadata{}
		secret.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
		err := r.Client.Get(ctx, types.NamespacedName{Namespace: r.Namespace, Name: name}, secret)
		if err != nil && !Absent(err) {
			s.Install.Secrets = nil
			return err
		}
		s.Install.Secrets[name] = err == nil
	}
	return nil
}}

// Certificates reads the public certificates of CAs.
var Certificates = Part{"ConfigMaps with certificates of CAs", func(ctx context.Context, r Reader, s *Snapshot) (err error) {
	if s.Install.ManagerCA, err = get[corev1.ConfigMap](ctx, r, r.Namespace, meshv1.ManagerCAConfigMap); err != nil {
		return err
	}
	bundles := map[types.NamespacedName]corev1.ConfigMap{}
	err = list(ctx, r, func(page corev1.ConfigMapList) {
		for _, c := range page.Items {
			bundles[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = c
		}
	}, client.MatchingLabels{inject.BundleLabel: "true"})
	if err == nil {
		s.Install.Bundles = bundles
	}
	return err
}}

// OwnNamespace reads the namespace of the mesh.
var OwnNamespace = Part{"the namespace of the mesh", func(ctx context.Context, r Reader, s *Snapshot) (err error) {
	s.Install.Namespace, err = get[corev1.Namespace](ctx, r, "", r.Namespace)
	return err
}}

// Nodes reads the nodes.
var Nodes = Part{"nodes", func(ctx context.Context, r Reader, s *Snapshot) error {
	return list(ctx, r, func(page corev1.NodeList) { s.Nodes = append(s.Nodes, page.Items...) })
}}

// Reviews asks the apiserver whether the user may do what is in access.
func Reviews(access []Access) Part {
	return Part{"the user's permissions", func(ctx context.Context, r Reader, s *Snapshot) error {
		for _, a := range access {
			review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: a.Verb, Group: a.Group, Resource: a.Resource, Namespace: a.Namespace},
			}}
			if err := r.Client.Create(ctx, review); err != nil {
				return err
			}
			a.Allowed = review.Status.Allowed
			s.Access = append(s.Access, a)
		}
		return nil
	}}
}

// ended reports whether all containers of a pod have exited for good.
func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
