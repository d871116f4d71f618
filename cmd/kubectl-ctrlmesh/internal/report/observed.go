package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Observed is a workload on the mesh whose requests pass unchanged, because no ShardingConfig selects its
// pods.
type Observed struct {
	Namespace string `json:"namespace"`
	// Workload is such as statefulset/NAME; empty for pods of no StatefulSet or Deployment.
	Workload string   `json:"workload,omitempty"`
	Pods     []string `json:"pods"`
}

// observed returns the workloads of labelled pods that no configuration selects, sorted.
func observed(s *snapshot.Snapshot) []Observed {
	var out []Observed
	for i := range s.Pods {
		pod := &s.Pods[i]
		if slices.ContainsFunc(s.Configs, func(c v1alpha1.ShardingConfig) bool {
			is, problem := compile.Selects(&c) // an invalid one selects none
			return problem == nil && c.Namespace == pod.Namespace && is(pod)
		}) {
			continue
		}
		one := Observed{Namespace: pod.Namespace}
		if w, ok := layout.WorkloadOf(pod); ok {
			one.Workload = w.Argument()
		}
		at := slices.IndexFunc(out, func(o Observed) bool { return o.Namespace == one.Namespace && o.Workload == one.Workload })
		if at < 0 {
			at, out = len(out), append(out, one)
		}
		out[at].Pods = append(out[at].Pods, pod.Name)
	}
	slices.SortFunc(out, func(a, b Observed) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Workload, b.Workload))
	})
	return out
}

// maxPods bounds the pods that a line names.
const maxPods = 5

// title names a workload, or else its pods, for users.
func (o Observed) title() string {
	if o.Workload == "" {
		return fmt.Sprintf("%s: pod %s", o.Namespace, clip.Join(o.Pods, maxPods, ", "))
	}
	return o.Namespace + ": " + o.Workload
}

// next is what a user can do with it.
func (o Observed) next() string {
	if o.Workload == "" {
		return fmt.Sprintf("see kubectl ctrlmesh tap %s -n %s", o.Pods[0], o.Namespace)
	}
	return fmt.Sprintf("see kubectl ctrlmesh advise %s -n %s", o.Workload, o.Namespace)
}
