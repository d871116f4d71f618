package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// Faults is the state of FaultInjections, some seconds ago.
type Faults struct {
	Faults []Injection `json:"faultInjections"`
}

// Injection is the state of a FaultInjection.
type Injection struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// State is the reason of the condition Ready.
	State       string `json:"state"`
	Pods        int32  `json:"pods"`
	PodsInForce int32  `json:"podsInForce"`
	Injected    int64  `json:"injected"`
	// Until is when it ends by itself; absent if it does not, or the end is not known yet.
	Until *time.Time  `json:"until,omitempty"`
	Rules []FaultRule `json:"rules"`
}

// FaultRule is the state of a rule in all pods.
type FaultRule struct {
	Name string `json:"name"`
	// Faults are what the rule injects, such as "abort 409".
	Faults []string `json:"faults"`
	// Matched and Injected are numbers of requests, in the pods that the status lists.
	Matched  int64 `json:"matched"`
	Injected int64 `json:"injected"`
	// Pods is the number of these pods with a fault.
	Pods int `json:"pods"`
}

// FaultsOf returns the state of the FaultInjections in a snapshot.
func FaultsOf(s *snapshot.Snapshot) Faults {
	out := Faults{Faults: []Injection{}}
	for i := range s.Subjects.Faults {
		out.Faults = append(out.Faults, injectionOf(&s.Subjects.Faults[i]))
	}
	slices.SortFunc(out.Faults, func(a, b Injection) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return out
}

func injectionOf(f *v1alpha1.FaultInjection) Injection {
	out := Injection{
		Namespace: f.Namespace, Name: f.Name, State: stateOf(f.Status.Conditions), Pods: f.Status.Pods, PodsInForce: f.Status.PodsInForce, Injected: f.Status.Injected, Rules: []FaultRule{},
	}
	if end := f.Status.ExpirationTime; end != nil && f.Status.ExpirationGeneration == f.Generation {
		out.Until = new(end.UTC())
	}
	for i := range f.Spec.HTTPFaultInjections {
		rule := FaultRule{Name: f.Spec.HTTPFaultInjections[i].Name, Faults: faultsOf(&f.Spec.HTTPFaultInjections[i])}
		for _, t := range f.Status.TargetStatus {
			for _, is := range t.FaultSnapshots {
				if is.Name != rule.Name {
					continue
				}
				rule.Matched += is.Matched
				rule.Injected += is.Injected
				if is.Injected > 0 {
					rule.Pods++
				}
			}
		}
		out.Rules = append(out.Rules, rule)
	}
	return out
}

// faultsOf names the faults of a rule.
func faultsOf(r *v1alpha1.HTTPFaultInjection) (out []string) {
	abort := ""
	if r.Abort != nil {
		abort = fmt.Sprintf("abort %d", r.Abort.HTTPStatus)
	}
	for _, fault := range []struct {
		set  bool
		name string
	}{
		{r.Delay != nil, "delay"}, {r.Abort != nil, abort}, {r.Reset != nil, "reset"}, {r.Truncate != nil, "truncate"},
		{r.SlowBody != nil, "slowBody"}, {r.StaleList != nil, "staleList"}, {r.Watch != nil, "watch"},
	} {
		if fault.set {
			out = append(out, fault.name)
		}
	}
	return out
}

// Findings reports whether a fault is in force in a pod.
func (f Faults) Findings() bool {
	return slices.ContainsFunc(f.Faults, func(one Injection) bool { return one.PodsInForce > 0 })
}

// WriteText implements render.Report.
func (f Faults) WriteText(t *render.Text) {
	if len(f.Faults) == 0 {
		t.Line("there is no FaultInjection")
	}
	var rows, rules [][]string
	for _, one := range f.Faults {
		rows = append(rows, []string{one.Namespace, one.Name, one.State, render.Number(one.Pods), render.Number(one.PodsInForce), render.Number(one.Injected), render.Time(one.Until)})
		for _, r := range one.Rules {
			rules = append(rules, []string{one.Namespace, one.Name, r.Name, strings.Join(r.Faults, ", "), render.Number(r.Matched), render.Number(r.Injected), render.Number(int64(r.Pods))})
		}
	}
	t.Table([]string{"NAMESPACE", "FAULTINJECTION", "STATE", "PODS", "IN FORCE", "INJECTED", "UNTIL"}, rows)
	t.Table([]string{"NAMESPACE", "FAULTINJECTION", "RULE", "FAULTS", "MATCHED", "INJECTED", "IN PODS"}, rules)
}
