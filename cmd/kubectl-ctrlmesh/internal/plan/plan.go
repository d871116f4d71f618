// Package plan says how a root would divide what there is, before it is applied.
package plan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/label"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

// Preview is what a root would do.
type Preview struct {
	Namespace string       `json:"namespace"`
	Root      string       `json:"root"`
	Key       v1alpha1.Key `json:"key"`
	Shards    []Shard      `json:"shards"`
	// Skew is the weight of the heaviest shard over the mean; absent if nothing was counted.
	Skew float64 `json:"skew,omitempty"`
	// Moved is how many keys would have another owner than now; absent if no shard owns keys now.
	Moved *int `json:"moved,omitempty"`
	// Locks say who holds the operator's locks.
	Locks []string `json:"locks,omitempty"`
	// Problems must be solved before the shards work. Notes need not.
	Problems []string `json:"problems,omitempty"`
	Notes    []string `json:"notes,omitempty"`

	title string
}

// Shard is a shard that there would be.
type Shard struct {
	Name string `json:"name"`
	// Keys are the namespaces, or clusters, that it would own, and Objects the divided objects in them.
	Keys    *int   `json:"keys,omitempty"`
	Objects *int64 `json:"objects,omitempty"`
	// Heaviest is the key with the most objects.
	Heaviest string `json:"heaviest,omitempty"`
	// Pods are those that there are, and Lacks how many are missing.
	Pods  []string `json:"pods,omitempty"`
	Lacks int      `json:"lacks,omitempty"`

	title string
}

// Resources returns the resources that a root divides, of those that the apiserver serves, and a
// problem for each that it does not.
func Resources(lists []*metav1.APIResourceList, root *v1alpha1.ShardingConfig) (found []snapshot.Resource, problems []string) {
	divided := label.Divided(root)
	for _, name := range label.Resources(divided) {
		for _, list := range lists {
			gv, err := schema.ParseGroupVersion(list.GroupVersion)
			if err != nil || gv.Group != name.Group || slices.ContainsFunc(found, func(r snapshot.Resource) bool { return r.GroupResource == name }) {
				continue
			}
			if i := slices.IndexFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == name.Resource }); i >= 0 {
				found = append(found, snapshot.Resource{GroupResource: name, Version: gv.Version, Kind: list.APIResources[i].Kind, Namespaced: list.APIResources[i].Namespaced})
			}
		}
	}
	for _, unknown := range resources.ServedBy(lists, nil).Unknown(divided) {
		problems = append(problems, unknown+": correct spec.root.resourceSelector, because nothing is divided until all resources are known")
	}
	return found, problems
}

// Of returns what a root would do, by what a snapshot has of its workload, namespaces, objects and
// locks. The root has its defaults. problems are those of [Resources].
func Of(s *snapshot.Snapshot, root *v1alpha1.ShardingConfig, problems []string) (Preview, error) {
	p := Preview{Namespace: root.Namespace, Root: root.Name, Key: operator.KeyOf(root), Shards: []Shard{}, Problems: problems}
	resolved := root.DeepCopy()
	if err := layout.Resolve(&resolved.Spec, s.Labels); err != nil {
		return p, err
	}
	weights, counted := p.weigh(s)
	p.divide(s, resolved.Spec.Root, weights, counted)
	p.place(s, resolved.Spec.Root)
	p.lock(s, root)
	p.permit(s)
	return p, nil
}

// weigh returns the weights by which the manager would divide, if it may count what the user may.
// counted reports whether they are numbers of objects.
func (p *Preview) weigh(s *snapshot.Snapshot) (out layout.Weights, counted bool) {
	if p.Key == v1alpha1.KeyObject {
		p.Notes = append(p.Notes, "objects are assigned by uid (key: Object), so that each shard owns an equal part of them")
		return nil, false
	}
	out = layout.Weights{}
	if p.Key == v1alpha1.KeyNamespace {
		for name := range s.Labels {
			out[name] = 0
		}
	}
	for _, c := range s.Subjects.Counts {
		if c.Err != nil {
			p.Notes = append(p.Notes, fmt.Sprintf("%s do not count: %v", c.GroupResource, c.Err))
			continue
		}
		for key, n := range c.By {
			switch {
			case p.Key == v1alpha1.KeyCluster:
				out[key] = 1
			case c.Namespaced:
				out[key] += n
				counted = true
			}
		}
	}
	if !counted {
		for key := range out {
			out[key] = 1
		}
	}
	return out, counted
}

// divide fills in the shards with what they would own.
func (p *Preview) divide(s *snapshot.Snapshot, root *v1alpha1.RootConfig, w layout.Weights, counted bool) {
	next, last := layout.First(root, w), owned(s.Config(p.Namespace, p.Root))
	if len(last) > 0 {
		next = layout.Next(root, last, w)
	}
	for _, of := range layout.Shards(root) {
		one := Shard{Name: of.Name, title: operator.Short(root, of.Name)}
		if p.Key != v1alpha1.KeyObject {
			one.own(next[of.Name], w, counted)
		}
		p.Shards = append(p.Shards, one)
	}
	switch {
	case p.Key == v1alpha1.KeyObject:
		p.title = fmt.Sprintf("%d shards would divide the objects", len(p.Shards))
	case counted:
		total := int64(0)
		for _, n := range w {
			total += n
		}
		p.title = fmt.Sprintf("%d shards would divide %d %s with %d objects", len(p.Shards), len(w), unit(p.Key, len(w)), total)
		p.Skew = layout.Skew(next, root, w)
	default:
		p.title = fmt.Sprintf("%d shards would divide %d %s", len(p.Shards), len(w), unit(p.Key, len(w)))
	}
	if len(last) == 0 {
		return
	}
	moved := 0
	for key := range w {
		if ownerOf(last, key) != ownerOf(next, key) {
			moved++
		}
	}
	p.Moved = &moved
}

// own fills in what a shard would own.
func (s *Shard) own(scope sharding.Scope, w layout.Weights, counted bool) {
	keys, objects, most := 0, int64(0), int64(0)
	for _, key := range slices.Sorted(maps.Keys(w)) {
		if !scope.Owns(key) {
			continue
		}
		keys++
		objects += w[key]
		if w[key] > most {
			s.Heaviest, most = key, w[key]
		}
	}
	if s.Keys = &keys; counted {
		s.Objects = &objects
	} else {
		s.Heaviest = ""
	}
}

func unit(k v1alpha1.Key, n int) string {
	one := "namespace"
	if k == v1alpha1.KeyCluster {
		one = "cluster"
	}
	if n == 1 {
		return one
	}
	return one + "s"
}

// owned returns what each shard of a root owns now; nothing if there is no root yet.
func owned(root *v1alpha1.ShardingConfig) map[string]sharding.Scope {
	out := map[string]sharding.Scope{}
	if root == nil || root.Status.Root == nil {
		return out
	}
	for _, s := range root.Status.Root.Shards {
		if scope, err := sharding.Parse(s.Held); err == nil && !scope.Empty() {
			out[s.Name] = scope
		}
	}
	return out
}

func ownerOf(scopes map[string]sharding.Scope, key string) string {
	for name, scope := range scopes {
		if scope.Owns(key) {
			return name
		}
	}
	return ""
}

// place fills in which pods would belong to the shards.
func (p *Preview) place(s *snapshot.Snapshot, root *v1alpha1.RootConfig) {
	w := s.Subjects.Workload
	if root.TargetSelector != nil {
		p.Notes = append(p.Notes, "pods are not assigned here, because spec.root.targetSelector selects them")
		return
	}
	if w == nil {
		p.Problems = append(p.Problems, fmt.Sprintf("there is no %s in namespace %s: correct the target in spec.root", layout.Target(root), p.Namespace))
		return
	}
	needs := map[string]int{}
	for _, of := range layout.Shards(root) {
		needs[of.Name] = max(of.Replicas, 1)
	}
	var pods []*corev1.Pod
	names := map[string]string{}
	for i := range w.Pods {
		pods = append(pods, &w.Pods[i])
		names[string(w.Pods[i].UID)] = w.Pods[i].Name
	}
	placed, _ := layout.Place(root, int(w.Start), pods, nil)
	for i := range p.Shards {
		one := &p.Shards[i]
		for uid, shard := range placed {
			if shard == one.Name {
				one.Pods = append(one.Pods, names[uid])
			}
		}
		slices.Sort(one.Pods)
		if one.Lacks = max(0, needs[one.Name]-len(one.Pods)); one.Lacks > 0 {
			p.Problems = append(p.Problems, fmt.Sprintf("shard %s has %d of %d pods: scale %s up, or spec.root.auto down", one.title, len(one.Pods), needs[one.Name], w.Workload))
		}
	}
}

// lock fills in who holds the operator's locks.
func (p *Preview) lock(s *snapshot.Snapshot, root *v1alpha1.ShardingConfig) {
	locks := compile.NamedLocks(root)
	if len(locks) == 0 {
		p.Notes = append(p.Notes, "spec.controller names no lock: the mesh discovers those that the operator's pods use")
	}
	for _, name := range locks {
		lease, exists := s.Leases[name]
		holder, _ := snapshot.Holder(&lease, s.Now)
		config, byMesh := strings.CutPrefix(holder, v1alpha1.LockIdentityPrefix)
		switch {
		case !s.LeasesRead[name.Namespace]:
			p.Notes = append(p.Notes, fmt.Sprintf("who holds lock %s is unknown: the Leases of namespace %s cannot be read", name, name.Namespace))
		case !exists:
			p.Notes = append(p.Notes, fmt.Sprintf("there is no Lease %s: unless the operator elects by ConfigMaps or Endpoints, see whether spec.controller names its lock", name))
		case byMesh && config != p.Namespace+"/"+p.Root:
			p.Problems = append(p.Problems, fmt.Sprintf("lock %s is held by the mesh for ShardingConfig %s: correct spec.controller, or remove that one", name, config))
		case byMesh:
			p.Locks = append(p.Locks, fmt.Sprintf("%s is held by the mesh for this ShardingConfig", name))
		default:
			p.Locks = append(p.Locks, fmt.Sprintf("%s is held by %s", name, cmp.Or(holder, "nobody")))
		}
	}
}

// permit says what the manager may not do.
func (p *Preview) permit(s *snapshot.Snapshot) {
	if err := s.Requires(snapshot.ManagerLists(nil)); err != nil {
		p.Notes = append(p.Notes, fmt.Sprintf("whether the manager may count the objects is unknown: %v", err))
	}
	if names := s.Subjects.Unlisted; len(names) > 0 {
		texts := collect.Map(names, func(n schema.GroupResource) string { return n.String() })
		slices.Sort(texts)
		p.Notes = append(p.Notes, "the manager would divide without the numbers of some objects: "+label.Allow("list", texts))
	}
}
