// Package snapshot reads what the API says about the mesh into plain values, so that reports and
// findings are pure functions of them. It reads no keys: of Secrets it requests metadata alone.
package snapshot

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Names of the objects of the mesh.
const (
	// DefaultNamespace is where the manifests install the mesh.
	DefaultNamespace = "ctrlmesh-system"
	// Manager is the name of the Deployment of the manager, of its Lease, and the value of NameLabel
	// of its pods.
	Manager = "ctrlmesh-manager"
	// Agent is the name of the DaemonSet of the agents, and the value of NameLabel of their pods.
	Agent = "ctrlmesh-agent"
	// NameLabel on a pod of the mesh names the program.
	NameLabel = "app.kubernetes.io/name"
)

// Snapshot is what the API says about the mesh at one time. Parts that were not requested, and those
// in Unread, are empty.
type Snapshot struct {
	// Now is the time at the apiserver.
	Now time.Time
	// Namespace of the mesh.
	Namespace string
	// Kubernetes is the version of the apiserver, such as v1.36.3.
	Kubernetes string
	Mesh       Mesh
	Install    Install
	// Configs are the ShardingConfigs, and objects of the dialects as what they stand for.
	Configs []v1alpha1.ShardingConfig
	// Pods are those with the label of the mesh that have not exited, by name.
	Pods []corev1.Pod
	// Outside has the names of pods without the label, in the namespaces of operators.
	Outside map[types.NamespacedName]bool
	// Leases are those in the namespaces of locks. LeasesRead has these namespaces.
	Leases     map[types.NamespacedName]coordinationv1.Lease
	LeasesRead map[string]bool
	Nodes      []corev1.Node
	// Exists reports, for requested namespaces, whether they exist.
	Exists map[string]bool
	// Labels are the labels of all namespaces, by name.
	Labels map[string]labels.Set
	// Access is what the user may do, as far as it was requested.
	Access []Access
	// Subjects are what commands list and change beside ShardingConfigs.
	Subjects Subjects
	// Unread is what could not be read.
	Unread []Unread
}

// Mesh is what runs of the mesh. Objects that do not exist are nil.
type Mesh struct {
	Manager *appsv1.Deployment
	Agents  *appsv1.DaemonSet
	// Pods are those of the manager and of the agents.
	Pods []corev1.Pod
	// Lease is that of the manager's leader.
	Lease *coordinationv1.Lease
	// Settings are those of the administrator.
	Settings *corev1.ConfigMap
	Quotas   []corev1.ResourceQuota
	// Failures are messages about pods of the mesh that could not be created.
	Failures []string
}

// Install is what the manifests of the mesh install beside its programs, and what the manager
// creates, by name.
type Install struct {
	Definitions map[string]apiextensionsv1.CustomResourceDefinition
	Mutating    map[string]admissionv1.MutatingWebhookConfiguration
	Validating  map[string]admissionv1.ValidatingWebhookConfiguration
	Policies    map[string]admissionv1.ValidatingAdmissionPolicy
	Bindings    map[string]admissionv1.ValidatingAdmissionPolicyBinding
	// Secrets are those in the namespace of the mesh that the manager creates.
	Secrets map[string]bool
	// ManagerCA verifies the manager; nil if it does not exist.
	ManagerCA *corev1.ConfigMap
	// Bundles are the CAs that labelled pods trust.
	Bundles map[types.NamespacedName]corev1.ConfigMap
	// Namespace is the namespace of the mesh; nil if it does not exist.
	Namespace *corev1.Namespace
}

// Subjects are objects that commands list and change.
type Subjects struct {
	// Workload and Pod are nil if they do not exist.
	Workload *Workload
	Pod      *corev1.Pod
	// Usage is what the pods of the workload requested, as the manager recorded it; nil if it did not.
	Usage    *meshv1.WorkloadUsage
	Breakers []v1alpha1.CircuitBreaker
	Faults   []v1alpha1.FaultInjection
	// Translated are the CircuitBreakers that TrafficPolicies stand for.
	Translated []*v1alpha1.CircuitBreaker
	// Applied are objects of the mesh's kinds and of its dialects.
	Applied []*unstructured.Unstructured
	// Counts are the numbers of objects, and Unlisted the resources that the manager may not list.
	Counts   []Count
	Unlisted []schema.GroupResource
}

// Access is whether the user may do something.
type Access struct {
	Verb, Group, Resource string
	// Namespace is empty for all namespaces, and for resources without any.
	Namespace string
	Allowed   bool
}

// Unread is a part that could not be read.
type Unread struct {
	// What was to be read.
	What string
	Err  error
}

// Err returns an error that names all parts that could not be read; nil if there is none.
func (s *Snapshot) Err() error {
	if len(s.Unread) == 0 {
		return nil
	}
	var texts []string
	for _, u := range s.Unread {
		texts = append(texts, fmt.Sprintf("reading %s: %v", u.What, u.Err))
	}
	return errors.New(strings.Join(texts, "; "))
}

// Has reports whether a part that was requested could be read.
func (s *Snapshot) Has(p Part) bool { return s.Requires(p) == nil }

// Requires returns an error if a part that was requested could not be read.
func (s *Snapshot) Requires(p Part) error {
	for _, u := range s.Unread {
		if u.What == p.what {
			return fmt.Errorf("reading %s: %w", u.What, u.Err)
		}
	}
	return nil
}

// Config returns the configuration of a name that is not derived from a root; nil if there is none.
func (s *Snapshot) Config(namespace, name string) *v1alpha1.ShardingConfig {
	for i := range s.Configs {
		if c := &s.Configs[i]; c.Namespace == namespace && c.Name == name {
			return c
		}
	}
	return nil
}

// Program returns the pods of a program of the mesh.
func (s *Snapshot) Program(name string) (out []*corev1.Pod) {
	for i := range s.Mesh.Pods {
		if s.Mesh.Pods[i].Labels[NameLabel] == name {
			out = append(out, &s.Mesh.Pods[i])
		}
	}
	return out
}

// Holder returns the holder of a Lease at a time; empty if it has none. since is when the last holder
// lost it, as far as the Lease shows.
func Holder(l *coordinationv1.Lease, now time.Time) (identity string, since time.Time) {
	if l == nil {
		return "", time.Time{}
	}
	var renewed time.Time
	if l.Spec.RenewTime != nil {
		renewed = l.Spec.RenewTime.Time
	}
	if l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity == "" {
		return "", renewed
	}
	if l.Spec.LeaseDurationSeconds != nil && !renewed.IsZero() {
		if ends := renewed.Add(time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second); now.After(ends) {
			return "", ends
		}
	}
	return *l.Spec.HolderIdentity, time.Time{}
}
