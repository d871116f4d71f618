package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// world is all that the demo's result is made of, as it was read at one moment.
type world struct {
	now     time.Time
	configs []meshv1alpha1.ShardingConfig
	pods    []corev1.Pod
	leases  []coordinationv1.Lease
	tallies []tallyv1.Tally
	traffic *kube.Traffic
}

// counts is the demo's last line.
type counts struct {
	Shards     int // ShardingConfigs of which every member is captured
	Namespaces int // with objects
	Objects    int
	Missing    int // objects that nobody reconciled
	Overlap    int // objects that two pods or more reconciled
	Leaders    int // shards of which a living member holds the shard's lock
	Leaked     int // requests that went around the mesh
}

func (c counts) String() string {
	return fmt.Sprintf("demo: shards=%d namespaces=%d objects=%d missing=%d overlap=%d leaders=%d leaked=%d",
		c.Shards, c.Namespaces, c.Objects, c.Missing, c.Overlap, c.Leaders, c.Leaked)
}

func (w *world) count() counts {
	c := counts{Objects: len(w.tallies), Leaked: len(w.traffic.Leaked)}
	for i := range w.configs {
		if w.captured(&w.configs[i]) {
			c.Shards++
		}
		if w.leader(&w.configs[i]) != "" {
			c.Leaders++
		}
	}
	namespaces := map[string]bool{}
	for _, t := range w.tallies {
		namespaces[t.Namespace] = true
		switch {
		case t.Status.ObservedGeneration < t.Generation:
			c.Missing++
		case len(t.Status.ReconciledBy) > 1:
			c.Overlap++
		}
	}
	c.Namespaces = len(namespaces)
	return c
}

// doubts are what the counts do not tell and what yet spoils the result.
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
		for _, pod := range t.Status.ReconciledBy {
			if c := w.configOf(pod); c != nil && !owns(c, t.Namespace) {
				strays++
				example = fmt.Sprintf("%s/%s by %s", t.Namespace, t.Name, pod)
			}
		}
	}
	if strays > 0 {
		out = append(out, fmt.Sprintf("%d objects were reconciled by a pod of another shard: %s, for one", strays, example))
	}
	return out
}

// row is what the table says of one pod.
type row struct {
	shard, pod, node, capture string
	locks                     []string // that it holds
	namespaces                []string // in which it reconciled
	objects                   int
}

func (w *world) rows() []row {
	var out []row
	for i := range w.pods {
		pod := &w.pods[i]
		r := row{pod: pod.Name, node: pod.Spec.NodeName}
		if c := w.configOf(pod.Name); c != nil {
			r.shard = c.Name
			r.capture = capture(c, pod.Name)
		}
		for j := range w.leases {
			if w.holder(&w.leases[j]) == pod.Name {
				r.locks = append(r.locks, w.leases[j].Name)
			}
		}
		for _, t := range w.tallies {
			if slices.Contains(t.Status.ReconciledBy, pod.Name) {
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

// members are the living pods that a shard selects.
func (w *world) members(c *meshv1alpha1.ShardingConfig) []string {
	selector, err := metav1.LabelSelectorAsSelector(c.Spec.Selector)
	if err != nil { // the apiserver took it, so it parses
		return nil
	}
	var out []string
	for i := range w.pods {
		if kube.PodReady(&w.pods[i]) && selector.Matches(labels.Set(w.pods[i].Labels)) {
			out = append(out, w.pods[i].Name)
		}
	}
	return out
}

// configOf is the shard that a living pod is a member of, or nil.
func (w *world) configOf(pod string) *meshv1alpha1.ShardingConfig {
	for i := range w.configs {
		if slices.Contains(w.members(&w.configs[i]), pod) {
			return &w.configs[i]
		}
	}
	return nil
}

// captured says whether a shard has members and the mesh has captured them all.
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

// leader is the living member that holds the lock of a shard, or "".
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

func lockOf(c *meshv1alpha1.ShardingConfig) string {
	return c.Spec.Controller.LeaderElectionName + "---" + c.Name
}

// holder is the pod that holds a lease that has not run out, or "".
func (w *world) holder(l *coordinationv1.Lease) string {
	s := l.Spec
	if s.HolderIdentity == nil || s.RenewTime == nil || s.LeaseDurationSeconds == nil {
		return ""
	}
	if s.RenewTime.Add(time.Duration(*s.LeaseDurationSeconds) * time.Second).Before(w.now) {
		return ""
	}
	pod, _, _ := strings.Cut(*s.HolderIdentity, "_") // host name, then what makes it unique
	return pod
}

// owns says whether a namespace's objects are in the scope of a shard.
func owns(c *meshv1alpha1.ShardingConfig, namespace string) bool {
	for _, l := range c.Spec.Limits {
		selector, err := metav1.LabelSelectorAsSelector(l.Selector)
		if err != nil || !selector.Matches(labels.Set{meshv1alpha1.NamespaceLabel: namespace}) {
			return false
		}
	}
	return true
}
