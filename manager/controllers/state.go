package controllers

import (
	"bytes"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/quota"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

// State is what the controllers share. Each field has one writer, with the exceptions that
// wiring_test.go explains.
type State struct {
	// Settings are the administrator's; never nil once the manager serves.
	Settings Value[platform.Settings]
	// Additional is where clients reach the apiserver beside its Service; nil until the leader
	// has resolved the names.
	Additional Value[apiserver.Additional]
	// Cluster is what agents must know of the apiserver and of each other.
	Cluster Value[meshv1.Cluster]
	// Listed is what the policy controller compiles.
	Listed Value[Listed]
	// Compiled are the policies that were pushed last; nil before the first push.
	Compiled Value[Compiled]
	// MeshBundle and EgressBundle are the CAs that all namespaces have which need them, but for
	// those that have refused them for long.
	MeshBundle, EgressBundle Value[[]byte]
	// MissingBundles are why bundles cannot be written, by namespace.
	MissingBundles Value[map[string]string]
	// Entries are the webhook entries of VirtualApps by uid.
	Entries Value[map[types.UID]decide.Entry]
	// ForbiddenLocks are why members of configurations, by uid, may not update the locks of
	// their shards.
	ForbiddenLocks Value[map[types.UID]string]
	// LocksRead: the lock controller has looked at the operators' locks.
	LocksRead atomic.Bool
	// Allocator has the record of the shares of rules. Sharing is locked while shares are
	// decided, and from a compilation that reads them until its policies are pushed.
	Allocator quota.Allocator
	Sharing   sync.Mutex

	Changed Signals
}

// RequestTimeout is the apiserver's --request-timeout.
func (s *State) RequestTimeout() time.Duration {
	return s.Settings.Load().APIServer.RequestTimeout.Duration
}

// Entry returns the webhook entry of a VirtualApp.
func (s *State) Entry(app *v1alpha1.ShardingConfig) decide.Entry {
	if entries := s.Entries.Load(); entries != nil {
		return (*entries)[app.UID]
	}
	return decide.Entry{}
}

// MissingBundle returns why the bundles of a namespace cannot be written; empty if they can.
func (s *State) MissingBundle(namespace string) string {
	if missing := s.MissingBundles.Load(); missing != nil {
		return (*missing)[namespace]
	}
	return ""
}

// Signals notify of state that is kept outside State.
type Signals struct {
	// Objects that the manager watches, as far as policies follow from them.
	Objects Signal
	// Roots: policies follow from which keys shards own, and Demands: the operators' locks
	// that roots ask for. Both by the root controller.
	Roots, Demands Signal
	// Locks: who holds the operators' locks, by the lock controller.
	Locks Signal
	// Agents: what agents report, and Counts if that is only what rules have done. By the
	// push server.
	Agents, Counts Signal
	// MeshCA and EgressCA: the bundles, by the certificate controller.
	MeshCA, EgressCA Signal
	// Bundles: a ConfigMap with a bundle is not as it should be.
	Bundles Signal
	// Shares have been decided that are recorded, and Unrecorded ones that are not. Both
	// by the share controller. Recorded: they are now, by the traffic controller.
	Shares, Unrecorded, Recorded Signal
	// Stamping: the progress of the labels of objects, by the sweeper.
	Stamping Signal
	// Weights of namespaces, by the weigher.
	Weights Signal
	// Answers to the queries of rollouts' analyses, by their evaluator.
	Answers Signal
	// Resources: the apiserver serves other ones, by the catalog.
	Resources Signal
}

// Listed is what was there when the policy controller looked.
type Listed struct {
	Pods       []*corev1.Pod
	Configs    []*v1alpha1.ShardingConfig
	Namespaces []string // sorted
	// Enacted is by what Configs follow what their shards act by.
	Enacted *roots.Enacted
	// Acting is what the members of the hand-written configurations among Configs act by.
	Acting transfer.Memory
	// Resolved is which roots among Configs were matched with the namespaces.
	Resolved roots.Resolved
	// Unknown are the resources that configurations name, by uid, and that are not served.
	Unknown map[types.UID]resources.Unknown
	Rules   compile.Rules
	// TrafficPolicies are those that are served. Rules has their CircuitBreakers.
	TrafficPolicies []serve.Policy
}

// Compiled is what was compiled, and from what.
type Compiled struct {
	compile.Result
	*Listed
}

// Differ reports whether the bundle has changed.
func Differ(before, after *[]byte) bool { return before == nil || !bytes.Equal(*before, *after) }

// Kinds of which only the metadata is watched.
var (
	NamespaceKind = corev1.SchemeGroupVersion.WithKind("Namespace")
	NodeKind      = corev1.SchemeGroupVersion.WithKind("Node")
)

// MetadataOf returns an empty object of a kind, to read or watch its metadata.
func MetadataOf(kind schema.GroupVersionKind) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(kind)
	return o
}
