package explain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// maxWriters bounds the pods whose writes are evaluated.
const maxWriters = 8

// Write is what would happen to a write of a pod now.
type Write struct {
	Pod      string `json:"pod"`
	Resource string `json:"resource"`
	Action   Action `json:"effect"`
	Code     int32  `json:"code,omitempty"`
}

// Writes returns what would happen if the pods of a root wrote an object of a divided resource in a
// namespace now. It is empty if that is not known, or if the root has another key than Namespace.
func Writes(s *snapshot.Snapshot, c *v1alpha1.ShardingConfig, namespace string) (out []Write) {
	of := dividedOf(c)
	if of == nil || operator.KeyOf(c) != v1alpha1.KeyNamespace || namespace == "" {
		return nil
	}
	shards, err := operator.Shards(s, c)
	if err != nil {
		return nil
	}
	all, err := policiesOf(s)
	if err != nil {
		return nil
	}
	var pods []*corev1.Pod
	for i := range shards {
		pods = append(pods, shards[i].Pods...)
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	for _, pod := range pods[:min(len(pods), maxWriters)] {
		q := &Request{Verb: "update", Resource: *of, Namespace: namespace}
		q.Pod.Namespace, q.Pod.Name = pod.Namespace, pod.Name
		about := *s
		about.Subjects.Pod = pod
		if v, err := verdict(&about, q, all.of); err == nil {
			out = append(out, Write{pod.Name, v.Resource, v.Action, v.Code})
		}
	}
	return out
}

// dividedOf returns a resource that a root divides; nil if it names none. Its version does not matter.
func dividedOf(c *v1alpha1.ShardingConfig) *Resource {
	if c.Spec.Root == nil {
		return nil
	}
	for _, l := range c.Spec.Root.ResourceSelector {
		for _, g := range l.RelateResources {
			if len(g.APIGroups) > 0 && len(g.Resources) > 0 && g.APIGroups[0] != "*" && g.Resources[0] != "*" {
				return &Resource{Group: g.APIGroups[0], Version: "v1", Name: g.Resources[0], Kind: "Object", Namespaced: true}
			}
		}
	}
	return nil
}

// DescribeWrites says what Writes returns in one line; empty if that is nothing.
func DescribeWrites(writes []Write) string {
	var texts []string
	for _, w := range writes {
		what := "passes"
		switch w.Action {
		case Refused:
			what = fmt.Sprint(w.Code)
		case Disconnected:
			what = "no connection"
		case DryRun:
			what = "a dry run"
		case Faulted:
			what = "a fault"
		}
		texts = append(texts, fmt.Sprintf("by %s: %s", w.Pod, what))
	}
	if len(texts) == 0 {
		return ""
	}
	return fmt.Sprintf("a write of %s now %s", writes[0].Resource, strings.Join(texts, ", "))
}
