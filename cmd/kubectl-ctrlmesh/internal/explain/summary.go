package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// maxNamed bounds how many resources, locks or rules a line names.
const maxNamed = 5

// Policy is what the mesh does with the requests of a pod, in sentences.
type Policy struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// PodState is what the pod is to the mesh.
	PodState string   `json:"podState"`
	Rules    []string `json:"rules"`
	Notes    []string `json:"notes,omitempty"`
}

// WriteText implements render.Report.
func (p Policy) WriteText(t *render.Text) {
	t.Line("%s, %s", p.Pod, p.PodState)
	for _, rule := range p.Rules {
		t.Line("  %s", rule)
	}
	for _, note := range p.Notes {
		t.Line("  note: %s", note)
	}
}

// PolicyOf returns the policy of the pod of a snapshot.
func PolicyOf(s *snapshot.Snapshot) (Policy, error) {
	pod := s.Subjects.Pod
	out := Policy{Namespace: pod.Namespace, Pod: pod.Name, Rules: []string{}}
	if !compile.Labelled(pod) {
		out.PodState = outside
		return out, nil
	}
	in, err := policyOf(s, pod)
	if err != nil {
		return out, err
	}
	out.PodState, out.Notes = memberText(s, pod, in), in.notes
	add := func(format string, args ...any) { out.Rules = append(out.Rules, fmt.Sprintf(format, args...)) }
	switch {
	case in.GetRefuse() != "":
		add("All requests to the apiserver are refused: %s.", in.GetRefuse())
	case in.GetPassthrough():
		add("Connections to the apiserver pass undecrypted (clientCertificates: Passthrough).")
	case in.GetSharding() == nil:
		add("Requests to the apiserver pass unchanged, because no ShardingConfig selects the pod.")
	default:
		shardRules(add, in)
	}
	trafficRules(add, in.GetTraffic())
	if direct, why := in.withoutAgent(pod.Name); direct {
		add("While its node has no agent, connections go directly to the apiserver (%s).", why)
	} else {
		add("While its node has no agent, connections are refused (%s).", why)
	}
	return out, nil
}

// shardRules adds what a shard does with requests.
func shardRules(add func(string, ...any), in inForce) {
	spec := in.GetSharding()
	divided := dividedBy(spec)
	switch {
	case spec.GetDryRun():
		add("Nothing is changed or refused (dryRun: true): the proxy counts what it would do without it, as follows.")
	case spec.GetStandby():
		add("The pod is in standby: lists of %s are empty, and writes of them get 503. %s", divided, spec.GetStandbyReason())
		return
	}
	if divided != "" {
		add("Lists and watches of %s have the objects of shard %s alone (method: %s).", divided, spec.GetShard(), cmp.Or(in.config.Status.Method, string(method(in))))
		add("%s", writes(spec))
	}
	if owner := spec.GetClusterScopedOwner(); owner != "" {
		add("Objects in no namespace are written by shard %s alone (clusterScoped: DefaultOnly).", owner)
	}
	locks := collect.Map(spec.GetLocks(), func(l *meshv1.Lock) string {
		return fmt.Sprintf("%s/%s is %s", l.GetNamespace(), l.GetName(), l.GetUpstreamName())
	})
	if len(locks) > 0 {
		add("Locks have names of their own at the apiserver: %s.", clip.Join(locks, maxNamed, ", "))
	}
	if spec.GetShadow() != nil {
		add("The pod is a shadow: its writes pass as dry runs, and are compared with those of others.")
	}
	if agents := spec.GetDeniedUserAgents(); len(agents) > 0 {
		add("Clients with User-Agent %s find nothing (defaultOnlyUserAgents).", clip.Join(agents, maxNamed, ", "))
	}
}

// dividedBy names the resources that limits divide; empty if there are none.
func dividedBy(spec *meshv1.Sharding) string {
	var out []string
	for _, l := range spec.GetLimits() {
		if len(l.GetResources()) == 0 {
			return "all resources"
		}
		for _, g := range l.GetResources() {
			for _, group := range g.GetApiGroups() {
				for _, resource := range g.GetResources() {
					out = append(out, strings.TrimSuffix(schema.GroupResource{Group: group, Resource: resource}.String(), ".*"))
				}
			}
		}
	}
	slices.Sort(out)
	return clip.Join(slices.Compact(out), maxNamed, ", ")
}

// writes says what happens to writes of objects of other shards.
func writes(spec *meshv1.Sharding) string {
	of := "objects of other shards"
	if spec.GetFenceNamespaces() {
		of = "objects of other shards, and of all resources in their namespaces"
	}
	switch spec.GetIsolation() {
	case meshv1.Isolation_ISOLATION_OBSERVE:
		return fmt.Sprintf("Writes of %s pass, and are counted (isolation: %s).", of, v1alpha1.IsolationObserve)
	case meshv1.Isolation_ISOLATION_OFF:
		return fmt.Sprintf("Writes of %s pass (isolation: %s).", of, v1alpha1.IsolationOff)
	}
	return fmt.Sprintf("Writes of %s are refused with 403 (isolation: %s).", of, v1alpha1.IsolationEnforce)
}

// trafficRules names the objects whose rules apply.
func trafficRules(add func(string, ...any), of *meshv1.Traffic) {
	if breakers := collect.Map(of.GetBreakers(), (*meshv1.Breaker).GetName); len(breakers) > 0 {
		add("CircuitBreakers limit its requests: %s.", clip.Join(breakers, maxNamed, ", "))
	}
	if injections := collect.Map(of.GetInjections(), (*meshv1.Injection).GetName); len(injections) > 0 {
		add("FaultInjections inject faults: %s.", clip.Join(injections, maxNamed, ", "))
	}
	if ports := of.GetEgress().GetPorts(); len(ports) > 0 {
		add("Connections to other hosts are redirected at the ports %s.", strings.Trim(fmt.Sprint(ports), "[]"))
	}
}
