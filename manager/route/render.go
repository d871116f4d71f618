// Package route renders how agents route the reviews that the apiserver sends to the
// webhooks of operators. It is pure.
package route

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/readiness"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Service is a Service that webhook configurations call.
type Service struct {
	types.NamespacedName
	Selector map[string]string
	// CA is the bundles by which the apiserver verifies it, PEM.
	CA []byte
}

// selects reports whether a Service selects a pod.
func (s Service) selects(pod *corev1.Pod) bool {
	return len(s.Selector) > 0 && s.Namespace == pod.Namespace && labels.SelectorFromSet(s.Selector).Matches(labels.Set(pod.Labels))
}

// serverName is the name under which the apiserver verifies it.
func (s Service) serverName() string { return s.Name + "." + s.Namespace + ".svc" }

// Routed reports whether the reviews of a configuration's pods are routed. The pods of a
// derived one belong to its root.
func Routed(c *v1alpha1.ShardingConfig) bool {
	return c != nil && c.Spec.Webhook != nil && !c.Spec.DryRun && !compile.Derived(c) && !compile.PassesThrough(c) &&
		(c.Spec.Root == nil || !compile.Withdrawn(c))
}

// Render returns the webhooks of all nodes that have pods of an operator with a webhook, by
// node. It follows what was compiled: what shards own, and which pods belong to them.
func Render(c compile.Result, services []Service) map[string]*meshv1.Webhooks {
	nodes := map[string]*meshv1.Webhooks{}
	for _, o := range operators(c, services) {
		o.addTo(nodes, o.render(services))
	}
	for _, w := range nodes {
		fit(w)
		content, _ := proto.MarshalOptions{Deterministic: true}.Marshal(w) // valid messages have no error
		sum := sha256.Sum256(content)
		w.Version = hex.EncodeToString(sum[:8])
	}
	return nodes
}

// fit replaces the largest webhooks of a node by their problem, until the rest is not too large
// for its agent: the stream would end, and affect all pods of the node.
func fit(w *meshv1.Webhooks) {
	for proto.Size(w) > meshv1.MaxPolicyBytes {
		size, at := 0, 0
		for i, one := range w.Webhooks {
			if n := proto.Size(one); n > size && one.Problem == "" {
				size, at = n, i
			}
		}
		if size == 0 {
			return
		}
		w.Webhooks[at] = &meshv1.Webhook{Pods: w.Webhooks[at].Pods, Problem: fmt.Sprintf(
			"the routes of its reviews have %d KiB, and with those of other operators on the node exceed %d MiB: name fewer namespaces in selectors and limits, or remove certificates from the caBundles of its webhooks",
			size>>10, meshv1.MaxPolicyBytes>>20)}
	}
}

// operator is the pods of one webhook and their shards.
type operator struct {
	config *v1alpha1.ShardingConfig // one of them, if they are hand-written
	pods   []*corev1.Pod
	shards map[types.UID]string // names by pod; none for a pod without a shard
	owned  map[string]sharding.Scope
	shared []*meshv1.SharedObjects
}

// operators returns the operators that have webhooks, in the order of the shards.
func operators(c compile.Result, services []Service) []*operator {
	var out []*operator
	byRoot := map[types.UID]*operator{}
	for _, s := range c.Shards {
		if Routed(s.Config) && s.Problem == nil && s.Config.Spec.Root != nil {
			o := &operator{config: s.Config, pods: s.Members, shards: map[types.UID]string{}, owned: map[string]sharding.Scope{}}
			byRoot[s.Config.UID] = o
			out = append(out, o)
		}
	}
	for _, s := range c.Shards {
		if s.Root == nil || byRoot[s.Root.UID] == nil {
			continue
		}
		o := byRoot[s.Root.UID]
		o.owned[s.Name] = s.Owned
		for _, pod := range s.Members {
			o.shards[pod.UID] = s.Name
		}
		o.readShared(c)
	}
	return append(out, handWritten(c, services)...)
}

// handWritten returns the operators of hand-written shards. Shards whose pods are behind one
// Service belong to one operator: the apiserver calls either.
func handWritten(c compile.Result, services []Service) []*operator {
	var out []*operator
	byService := map[string]*operator{}
	for _, s := range c.Shards {
		if !Routed(s.Config) || s.Problem != nil || s.Config.Spec.Root != nil || len(s.Members) == 0 {
			continue
		}
		key := s.String()
		for _, service := range services {
			if slices.ContainsFunc(s.Members, service.selects) {
				key = service.serverName()
				break
			}
		}
		o := byService[key]
		if o == nil || *o.config.Spec.Webhook != *s.Config.Spec.Webhook {
			o = &operator{config: s.Config, shards: map[types.UID]string{}, owned: map[string]sharding.Scope{}}
			byService[key] = o
			out = append(out, o)
		}
		o.pods = append(o.pods, s.Members...)
		for _, pod := range s.Members {
			o.shards[pod.UID] = s.Name
		}
		if scope, ok := scopeOf(c.Policies[s.Members[0].UID].GetSharding()); ok {
			o.owned[s.Name] = scope
		}
		o.readShared(c)
	}
	return out
}

// scopeOf returns the keys of a hand-written shard. It is not ok if its limits have several
// scopes, because a review does not say which limit is meant.
func scopeOf(s *meshv1.Sharding) (scope sharding.Scope, ok bool) {
	for i, l := range s.GetLimits() {
		one, err := sharding.FromProto(l.GetScope())
		if err != nil || l.GetScope() == nil || i > 0 && !one.Equal(scope) {
			return sharding.Scope{}, false
		}
		scope, ok = one, true
	}
	return scope, ok
}

// readShared notes the objects that every shard writes.
func (o *operator) readShared(c compile.Result) {
	for _, pod := range o.pods {
		if s := c.Policies[pod.UID].GetSharding(); s != nil && o.shared == nil {
			o.shared = collect.Filter(s.GetShared(), (*meshv1.SharedObjects).GetWriteAll)
		}
	}
}

// render returns what is the same on all nodes.
func (o *operator) render(services []Service) *meshv1.Webhook {
	spec := o.config.Spec
	out := &meshv1.Webhook{CertDir: spec.Webhook.CertDir, Port: uint32(spec.Webhook.Port), Shared: o.shared, Limits: o.limits()}
	if spec.Root != nil && spec.Root.Key == v1alpha1.KeyObject {
		out.Key = meshv1.Key_KEY_OBJECT
	}
	for _, name := range slices.Sorted(maps.Keys(o.owned)) {
		scope := o.owned[name]
		if scope.Empty() {
			continue
		}
		out.Owners = append(out.Owners, &meshv1.Owner{Shard: name, Scope: scope.Proto()})
		if scope.Owns("") { // the shard that has the rest of the key space
			out.DefaultShard = name
		}
	}
	ready := map[string][]string{}
	for _, pod := range o.pods {
		if shard := o.shards[pod.UID]; shard != "" && isReady(pod) {
			ready[shard] = append(ready[shard], pod.Status.PodIP)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(ready)) {
		slices.Sort(ready[name])
		out.Ready = append(out.Ready, &meshv1.ReadyPods{Shard: name, Addresses: ready[name]})
	}
	for _, s := range services {
		if len(s.CA) > 0 && slices.ContainsFunc(o.pods, s.selects) {
			out.Authorities = append(out.Authorities, &meshv1.ServerAuthority{ServerName: s.serverName(), Ca: s.CA})
		}
	}
	slices.SortFunc(out.Authorities, func(a, b *meshv1.ServerAuthority) int {
		return cmp.Or(cmp.Compare(a.ServerName, b.ServerName), bytes.Compare(a.Ca, b.Ca))
	})
	return out
}

// limits returns the resources that the operator is responsible for in some namespaces only. A
// scope may be large, so each occurs once.
func (o *operator) limits() (out []*meshv1.Limit) {
	if o.config.Spec.Root == nil {
		return nil
	}
	for _, l := range slices.Concat(o.config.Spec.Root.ResourceSelector, o.config.Spec.Limits) {
		if len(l.Namespaces) == 0 {
			continue
		}
		scope := sharding.Keys(layout.Named(l.Namespaces)...).Proto()
		i := slices.IndexFunc(out, func(o *meshv1.Limit) bool { return proto.Equal(o.Scope, scope) })
		if i < 0 {
			i, out = len(out), append(out, &meshv1.Limit{Scope: scope})
		}
		out[i].Resources = append(out[i].Resources, collect.Map(l.RelateResources, func(r v1alpha1.ResourceGroup) *meshv1.ResourceGroup {
			return &meshv1.ResourceGroup{ApiGroups: r.APIGroups, Resources: r.Resources}
		})...)
	}
	return out
}

func isReady(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && pod.Status.PodIP != "" && readiness.Of(pod)
}

// addTo adds an operator to the nodes that have pods of it.
func (o *operator) addTo(nodes map[string]*meshv1.Webhooks, same *meshv1.Webhook) {
	here := map[string]map[string]string{}
	for _, pod := range o.pods {
		node := pod.Spec.NodeName
		if node == "" {
			continue
		}
		if here[node] == nil {
			here[node] = map[string]string{}
		}
		here[node][string(pod.UID)] = o.shards[pod.UID]
	}
	for node, pods := range here {
		w := proto.CloneOf(same)
		w.Pods = pods
		if nodes[node] == nil {
			nodes[node] = &meshv1.Webhooks{}
		}
		nodes[node].Webhooks = append(nodes[node].Webhooks, w)
	}
}
