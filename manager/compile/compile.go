package compile

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Policy is what one pod is held to, and the node whose agent must know.
type Policy struct {
	// Node is empty while the pod is not scheduled.
	Node string
	*meshv1.PodPolicy
}

// Shard is what became of one configuration.
type Shard struct {
	Config *v1alpha1.ShardingConfig
	// Members are the pods it selects, by name.
	Members []*corev1.Pod
	// Lock is the upstream name of its lock, empty without leader election.
	Lock string
	// Problem says why the configuration has no effect, for people.
	Problem *Problem
	// Conflicts are the members that another configuration selects too.
	Conflicts []Conflict
}

// Problem is something about a configuration that only its author can mend.
type Problem struct {
	// Reason is a condition's reason.
	Reason  string
	Message string
}

// Reasons of a Problem.
const (
	ReasonRootNotSupported = "RootNotSupported"
	ReasonInvalid          = "Invalid"
)

// Conflict is a pod that several configurations select.
type Conflict struct {
	Pod string
	// Configs are all that select it, sorted.
	Configs []string
}

// Result is the outcome of Compile.
type Result struct {
	// Policies are by pod uid.
	Policies map[types.UID]Policy
	// Shards are sorted by namespace and name.
	Shards []Shard
}

// Compile assigns pods to configurations and renders the policy of each pod.
// Pods without the label and pods that have ended are left out. Members of roots
// whose pods are not known any more are refused where they ran.
func Compile(configs []*v1alpha1.ShardingConfig, pods []*corev1.Pod, roots map[types.NamespacedName]Root) Result {
	shards := make([]Shard, len(configs))
	for i, c := range slices.SortedFunc(slices.Values(configs), byName) {
		shards[i].Config = c
	}
	matchers := make([]labels.Selector, len(shards))
	rendered := make([]*meshv1.Sharding, len(shards))
	byNamespace := map[string][]int{}
	for i := range shards {
		s := &shards[i]
		matchers[i], s.Problem = Members(s.Config)
		if matchers[i] == nil {
			continue
		}
		byNamespace[s.Config.Namespace] = append(byNamespace[s.Config.Namespace], i)
		if s.Problem == nil {
			rendered[i], s.Problem = render(s.Config)
		}
		s.Lock = rendered[i].GetLock().GetUpstreamName()
	}

	res := Result{Policies: make(map[types.UID]Policy, len(pods)), Shards: shards}
	for _, pod := range slices.SortedFunc(slices.Values(pods), byName) {
		if !Labelled(pod) || Ended(pod) {
			continue
		}
		var selecting []int
		for _, i := range byNamespace[pod.Namespace] {
			if matchers[i].Matches(labels.Set(pod.Labels)) {
				selecting = append(selecting, i)
			}
		}
		policy := &meshv1.PodPolicy{
			Uid:       string(pod.UID),
			Namespace: pod.Namespace,
			Name:      pod.Name,
			Workload:  workload(pod),
		}
		for _, i := range selecting {
			shards[i].Members = append(shards[i].Members, pod)
		}
		switch {
		case len(selecting) == 0 && pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh:
			// It was admitted as a member, and would run unsharded now: its
			// configuration was deleted, or is not known here yet.
			policy.Refuse = fmt.Sprintf("pod %s/%s was admitted as a member of a shard, and no ShardingConfig selects it: create one that does, or delete the pod so that it is admitted anew", pod.Namespace, pod.Name)
		case len(selecting) > 1:
			names := make([]string, len(selecting))
			for n, i := range selecting {
				names[n] = shards[i].Config.Name
			}
			for _, i := range selecting {
				shards[i].Conflicts = append(shards[i].Conflicts, Conflict{Pod: pod.Name, Configs: names})
			}
			policy.Refuse = ConflictMessage(pod.Namespace, names)
		case len(selecting) == 1:
			s := shards[selecting[0]]
			if s.Problem != nil {
				policy.Refuse = fmt.Sprintf("ShardingConfig %s/%s: %s", pod.Namespace, s.Config.Name, s.Problem.Message)
				break
			}
			policy.Sharding = rendered[selecting[0]]
			policy.AnyToken = s.Config.Spec.TokenBinding == v1alpha1.TokenBindingOff
			policy.Passthrough = CanPassThrough(pod) && PassesThrough(s.Config)
			policy.FailOpen = CanFailOpen(pod) && s.Config.Spec.FailurePolicy == v1alpha1.FailOpen
		default:
			policy.FailOpen = CanFailOpen(pod)
			policy.AnyToken = true // there is nothing in which to ask for it
		}
		var err error
		if policy.Version, err = version(policy); err != nil {
			// What no agent could be told must not stop what all others are told.
			policy = &meshv1.PodPolicy{Uid: policy.Uid, Namespace: policy.Namespace, Name: policy.Name, Version: "unsound", Refuse: "the policy of this pod cannot be encoded"}
		}
		res.Policies[pod.UID] = Policy{Node: pod.Spec.NodeName, PodPolicy: policy}
	}
	return res
}

// Labelled tells whether a pod is on the mesh.
func Labelled(pod *corev1.Pod) bool { return pod.Labels[v1alpha1.EnableProxyLabel] == "true" }

// Ended tells whether a pod will run no more.
func Ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Members is the selector of a configuration's pods, in its namespace; nil with
// a problem when it selects none whatever their labels.
func Members(c *v1alpha1.ShardingConfig) (labels.Selector, *Problem) {
	if c.Spec.Root != nil {
		return nil, &Problem{ReasonRootNotSupported, "spec.root is accepted but has no effect in this version: no shards are derived and no pods are selected. Write one ShardingConfig per shard"}
	}
	s := c.Spec.Selector
	if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return nil, &Problem{ReasonInvalid, "spec.selector is empty: name the pods of this shard"}
	}
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return nil, &Problem{ReasonInvalid, "spec.selector: " + err.Error()}
	}
	return sel, nil
}

// Trust is the value of the trust annotation of pods admitted while the
// configuration selects them; nil for pods that none selects. Whoever may be let
// go past the proxy must be able to verify the apiserver.
func Trust(c *v1alpha1.ShardingConfig) string {
	if c == nil || c.Spec.FailurePolicy == v1alpha1.FailOpen || PassesThrough(c) {
		return v1alpha1.TrustBoth
	}
	return v1alpha1.TrustMesh
}

// CanFailOpen tells whether a pod's clients could verify the real apiserver.
func CanFailOpen(pod *corev1.Pod) bool {
	return pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustBoth
}

// CanPassThrough tells whether a pod's connections could end at the real
// apiserver: one that connects to the agent's address would not accept it there.
func CanPassThrough(pod *corev1.Pod) bool {
	return CanFailOpen(pod) && pod.Annotations[v1alpha1.CaptureAnnotation] != v1alpha1.CaptureAddress
}

// PassesThrough tells whether a configuration leaves the requests of its pods unread.
func PassesThrough(c *v1alpha1.ShardingConfig) bool {
	return c.Spec.ClientCertificates == v1alpha1.ClientCertificatesPassthrough
}

// ConflictMessage says that several configurations select a pod and what to do.
func ConflictMessage(namespace string, configs []string) string {
	return fmt.Sprintf("ShardingConfigs %s in namespace %s all select this pod, which must belong to one shard: change the pod's labels, or delete all but one and create them again with selectors that exclude each other",
		strings.Join(configs, ", "), namespace)
}

// UpstreamLock is the name under which a shard's lock is held.
func UpstreamLock(leaderElectionName, shard string) string {
	return leaderElectionName + "---" + shard
}

// render is nil for a configuration that divides nothing.
func render(c *v1alpha1.ShardingConfig) (*meshv1.Sharding, *Problem) {
	if PassesThrough(c) {
		if len(c.Spec.Limits) > 0 || c.Spec.Controller != nil {
			return nil, &Problem{ReasonInvalid, "spec.clientCertificates: Passthrough leaves requests unread, so nothing can be divided: remove spec.limits and spec.controller, or choose Refuse"}
		}
		return nil, nil
	}
	out := &meshv1.Sharding{Shard: c.Name}
	for i, l := range c.Spec.Limits {
		limit := &meshv1.Limit{}
		for _, r := range l.RelateResources {
			limit.Resources = append(limit.Resources, &meshv1.ResourceGroup{ApiGroups: r.APIGroups, Resources: r.Resources})
		}
		if l.Selector != nil {
			sel, err := metav1.LabelSelectorAsSelector(l.Selector)
			if err != nil {
				return nil, &Problem{ReasonInvalid, fmt.Sprintf("spec.limits[%d].selector: %v", i, err)}
			}
			limit.Selector = sel.String()
		}
		out.Limits = append(out.Limits, limit)
	}
	if ctl := c.Spec.Controller; ctl != nil && ctl.LeaderElectionName != "" {
		out.Lock = &meshv1.Lock{
			Namespace:    c.Namespace,
			Name:         ctl.LeaderElectionName,
			UpstreamName: UpstreamLock(ctl.LeaderElectionName, c.Name),
		}
	}
	return out, nil
}

// workload is the name of what owns a pod, as people know it: a Deployment's
// pods are owned by a ReplicaSet named after it and the hash of its template.
// The apiserver does not check an owner's name, so it may be any bytes.
func workload(pod *corev1.Pod) string {
	owner := metav1.GetControllerOf(pod)
	if owner == nil {
		return pod.Name
	}
	name := strings.ToValidUTF8(owner.Name, "?")
	if hash := pod.Labels["pod-template-hash"]; owner.Kind == "ReplicaSet" && hash != "" {
		return strings.TrimSuffix(name, "-"+hash)
	}
	return name
}

// version hashes a policy's content. The message has no maps, so that its
// deterministic encoding is the same in every process of one build; another
// build may at worst push once more.
func version(p *meshv1.PodPolicy) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(p)
	if err != nil {
		return "", fmt.Errorf("encoding a policy: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8]), nil
}

func byName[T metav1.Object](a, b T) int {
	if c := strings.Compare(a.GetNamespace(), b.GetNamespace()); c != 0 {
		return c
	}
	return strings.Compare(a.GetName(), b.GetName())
}
