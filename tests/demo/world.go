package main

import (
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// world is the state from which the demo's result is computed.
type world struct {
	now     time.Time
	root    meshv1alpha1.ShardingConfig
	shards  []meshv1alpha1.ShardingConfig // derived from root
	pods    []corev1.Pod
	leases  []coordinationv1.Lease
	tallies []tallyv1.Tally
	// traffic has the requests of shards' members, and requests those of the operator,
	// including the time before it was sharded.
	traffic  *kube.Traffic
	requests []audit.Request
}

// counts is the demo's last line.
type counts struct {
	Shards     int // ShardingConfigs of which every member is captured
	Namespaces int // with objects
	Objects    int
	Missing    int // objects that no pod reconciled
	Overlap    int // objects of which two pods reconciled the last change, or wrote in turns
	Leaders    int // shards of which a running member holds the shard's lock
	Leaked     int // requests that bypassed the mesh
}

func (c counts) String() string {
	return fmt.Sprintf("demo: shards=%d namespaces=%d objects=%d missing=%d overlap=%d leaders=%d leaked=%d",
		c.Shards, c.Namespaces, c.Objects, c.Missing, c.Overlap, c.Leaders, c.Leaked)
}

func (w *world) count() counts {
	c := counts{Objects: len(w.tallies), Leaked: len(w.traffic.Leaked)}
	for i := range w.shards {
		if w.captured(&w.shards[i]) {
			c.Shards++
		}
		if w.leader(&w.shards[i]) != "" {
			c.Leaders++
		}
	}
	namespaces := map[string]bool{}
	turns := inTurns(w.requests)
	for _, t := range w.tallies {
		namespaces[t.Namespace] = true
		switch {
		case t.Status.ObservedGeneration < t.Generation:
			c.Missing++
		case len(reconciledBy(&t)) > 1 || turns[t.Namespace+"/"+t.Name]:
			c.Overlap++
		}
	}
	c.Namespaces = len(namespaces)
	return c
}

// reconciledBy returns the pods that reconciled the last change of an object.
func reconciledBy(t *tallyv1.Tally) (pods []string) {
	for pod, generation := range t.Status.Generations {
		if generation == t.Generation {
			pods = append(pods, pod)
		}
	}
	slices.Sort(pods)
	return pods
}

// inTurns returns the objects, as namespace/name, that a pod wrote again after another pod
// did: both owned them at the same time. During adoption, an object has one owner after
// another.
func inTurns(requests []audit.Request) map[string]bool {
	writes := slices.DeleteFunc(slices.Clone(requests), func(r audit.Request) bool {
		return r.Resource != "tallies" || !r.Writes() || r.Code != http.StatusOK
	})
	slices.SortStableFunc(writes, func(a, b audit.Request) int { return a.Received.Compare(b.Received) })
	type turn struct {
		last   string // the last writer
		before map[string]bool
	}
	turns := map[string]*turn{}
	out := map[string]bool{}
	for _, r := range writes {
		name := path.Base(strings.TrimSuffix(path.Clean(strings.SplitN(r.URI, "?", 2)[0]), "/status"))
		object := r.Namespace + "/" + name
		t := turns[object]
		if t == nil {
			t = &turn{last: r.PodUID, before: map[string]bool{}}
			turns[object] = t
		}
		if r.PodUID != t.last {
			t.before[t.last] = true
			t.last = r.PodUID
		}
		if t.before[r.PodUID] {
			out[object] = true
		}
	}
	return out
}

// doubts returns reasons to fail that the counts do not show.
func (w *world) doubts() []string {
	var out []string
	if len(w.traffic.Requests) == 0 {
		out = append(out, "leaked counts nothing: the audit log has no request of the operator")
	}
	if w.traffic.Lines == 0 {
		out = append(out, "the agents' logs have no access lines: do the agents log at debug level?")
	}
	for _, r := range w.traffic.Leaked[:min(3, len(w.traffic.Leaked))] {
		out = append(out, "leaked: "+r.String())
	}
	strays, example := 0, ""
	for _, t := range w.tallies {
		for _, pod := range reconciledBy(&t) {
			if c := w.shardOf(pod); c != nil && !owns(c, t.Namespace) {
				strays++
				example = fmt.Sprintf("%s/%s by %s", t.Namespace, t.Name, pod)
			}
		}
	}
	if strays > 0 {
		out = append(out, fmt.Sprintf("%d objects were reconciled by a pod of another shard, such as %s", strays, example))
	}
	return out
}

// row is the table's row of one pod.
type row struct {
	root, shard, pod, node, capture string
	owns                            int      // namespaces with objects that its shard owns
	locks                           []string // that it leads under
	namespaces                      []string // in which it reconciled the last changes
	objects                         int
}

func (w *world) rows() []row {
	var out []row
	for i := range w.pods {
		pod := &w.pods[i]
		r := row{pod: pod.Name, node: pod.Spec.NodeName}
		if c := w.shardOf(pod.Name); c != nil {
			r.root, r.shard = w.root.Name, c.Name
			r.capture = capture(c, pod.Name)
			r.owns = w.owned(c)
		}
		for j := range w.leases {
			if w.holder(&w.leases[j]) == pod.Name {
				r.locks = append(r.locks, w.leases[j].Name)
			}
		}
		for _, t := range w.tallies {
			if slices.Contains(reconciledBy(&t), pod.Name) {
				r.objects++
				r.namespaces = append(r.namespaces, t.Namespace)
			}
		}
		slices.Sort(r.namespaces)
		r.namespaces = slices.Compact(r.namespaces)
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b row) int { return strings.Compare(a.shard+a.pod, b.shard+b.pod) })
	return out
}

// owned returns the number of namespaces with objects that a shard owns.
func (w *world) owned(c *meshv1alpha1.ShardingConfig) int {
	namespaces := map[string]bool{}
	for _, t := range w.tallies {
		if owns(c, t.Namespace) {
			namespaces[t.Namespace] = true
		}
	}
	return len(namespaces)
}

// members returns the running pods that are assigned to a shard.
func (w *world) members(c *meshv1alpha1.ShardingConfig) []string {
	if w.root.Status.Root == nil {
		return nil
	}
	var out []string
	for _, a := range w.root.Status.Root.Assignments {
		i := slices.IndexFunc(w.pods, func(p corev1.Pod) bool { return string(p.UID) == a.UID })
		if a.Shard == c.Name && i >= 0 && kube.PodReady(&w.pods[i]) {
			out = append(out, a.Name)
		}
	}
	return out
}

// shardOf returns the shard of which a running pod is a member, or nil.
func (w *world) shardOf(pod string) *meshv1alpha1.ShardingConfig {
	for i := range w.shards {
		if slices.Contains(w.members(&w.shards[i]), pod) {
			return &w.shards[i]
		}
	}
	return nil
}

// captured reports whether a shard has members and all are captured.
func (w *world) captured(c *meshv1alpha1.ShardingConfig) bool {
	members := w.members(c)
	return len(members) > 0 && !slices.ContainsFunc(members, func(pod string) bool { return capture(c, pod) == "" })
}

func capture(c *meshv1alpha1.ShardingConfig, pod string) string {
	for _, m := range c.Status.Pods {
		if m.Name == pod {
			return m.Capture
		}
	}
	return ""
}

// leader returns the running member that holds the lock of a shard, or "".
func (w *world) leader(c *meshv1alpha1.ShardingConfig) string {
	for i := range w.leases {
		if w.leases[i].Name != lockOf(c) {
			continue
		}
		if pod := w.holder(&w.leases[i]); slices.Contains(w.members(c), pod) {
			return pod
		}
	}
	return ""
}

func lockOf(c *meshv1alpha1.ShardingConfig) string { return lock + "---" + c.Name }

// holder returns the pod that holds a lease that has not expired, or "".
func (w *world) holder(l *coordinationv1.Lease) string {
	s := l.Spec
	if s.HolderIdentity == nil || s.RenewTime == nil || s.LeaseDurationSeconds == nil {
		return ""
	}
	if s.RenewTime.Add(time.Duration(*s.LeaseDurationSeconds) * time.Second).Before(w.now) {
		return ""
	}
	pod, _, _ := strings.Cut(*s.HolderIdentity, "_") // host name, then a unique suffix
	return pod
}

// owns reports whether a shard owns the objects of a namespace.
func owns(c *meshv1alpha1.ShardingConfig, namespace string) bool {
	held, err := sharding.Parse(c.Status.Held)
	return err == nil && held.Owns(namespace)
}
