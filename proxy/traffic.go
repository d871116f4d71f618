package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// traffic is the compiled Traffic of a policy, or the last valid one; not good if no valid
// one is known.
type traffic struct {
	good    bool
	rules   *limit.Rules
	faults  *fault.Rules
	egress  *egress.Policy
	source  *meshv1.Traffic // from which it was compiled; nil: unknown
	problem error           // why it is not the policy's, and which applies instead
}

// trafficOf returns the rules that apply under a policy.
func trafficOf(p *Pod, m *meshv1.PodPolicy) traffic {
	if m.GetRefuse() != "" && m.GetTraffic() == nil {
		if last := lastTraffic(p); !last.good {
			return last // the refusal does not imply that there are no rules
		}
	}
	out, err := newTraffic(p, m.GetTraffic())
	if err == nil {
		return out
	}
	if last := lastTraffic(p); last.good {
		last.problem = fmt.Errorf("the last good ones stay in force: %w", err)
		return last
	}
	return unknown(m.GetTraffic(), err)
}

// lastTraffic returns the rules in force; before the first policy, those of the earlier proxy.
func lastTraffic(p *Pod) (out traffic) {
	if pol := p.policy.Load(); pol != nil {
		return pol.traffic
	}
	if p.info.Traffic != nil {
		out, _ = newTraffic(p, p.info.Traffic) // if they are invalid, it is unknown which applied
	}
	return out
}

func newTraffic(p *Pod, m *meshv1.Traffic) (out traffic, err error) {
	now := time.Now()
	if out.rules, err = limit.Compile(m, p.limits, now); err != nil {
		return traffic{}, err
	}
	if out.faults, err = fault.Compile(m, p.faults, now); err != nil {
		return traffic{}, err
	}
	if out.egress, err = egress.Compile(m, out.rules, out.faults); err != nil {
		return traffic{}, err
	}
	if out.source, out.good = m, true; m == nil {
		out.source = &meshv1.Traffic{}
	}
	return out, nil
}

// unknown applies when rules are invalid and no valid ones are known: connections to other
// hosts that the rules would have seen are refused.
func unknown(m *meshv1.Traffic, problem error) traffic {
	if m.GetEgress() == nil {
		return traffic{source: m, problem: fmt.Errorf("none are in force, for it is not known which were before: %w", problem)}
	}
	return traffic{source: m, egress: egress.Refuse(), problem: fmt.Errorf("it is not known which were in force before, and connections to other hosts are refused: %w", problem)}
}

// enforce puts the rules in force.
func (p *policy) enforce() {
	now := time.Now()
	p.rules.Enforce(now)
	p.faults.Enforce(now)
	p.pod.histories.Forget(func(res schema.GroupResource) bool {
		return p.lists(match.Kind{Group: res.Group, Resource: res.Resource}).Oldest() == 0
	})
}

// RuleStates returns the states of the limits in force.
func (p *Pod) RuleStates() []*meshv1.RuleState { return p.limits.States() }

// FaultStates returns the states of the faults in force.
func (p *Pod) FaultStates() []*meshv1.FaultState { return p.faults.States() }

// counted is what the pod's rules have counted, for another process.
type counted struct {
	Limits json.RawMessage `json:"limits,omitempty"`
	Faults json.RawMessage `json:"faults,omitempty"`
}

// maxTraffic bounds a counted, in bytes.
const maxTraffic = 2*keep.MaxExport + 64

// ExportTraffic returns what the pod's rules have counted, for the next agent.
func (p *Pod) ExportTraffic() ([]byte, error) {
	now := time.Now()
	limits, err := p.limits.Export(now)
	if err != nil {
		return nil, fmt.Errorf("exporting limits: %w", err)
	}
	faults, err := p.faults.Export(now)
	if err != nil {
		return nil, fmt.Errorf("exporting faults: %w", err)
	}
	return json.Marshal(counted{limits, faults})
}

// ImportTraffic imports what another process, of any version, exported, before or after a
// policy is applied. It omits what it cannot read, and returns an error about that.
func (p *Pod) ImportTraffic(data []byte) error {
	if len(data) > maxTraffic {
		return fmt.Errorf("importing counts of rules: larger than %d bytes", maxTraffic)
	}
	var in counted
	if err := json.Unmarshal(data, &in); err != nil {
		return fmt.Errorf("importing counts of rules: %w", err)
	}
	now := time.Now()
	limits, faults := p.limits.Import(in.Limits, now), p.faults.Import(in.Faults, now)
	if limits != nil {
		limits = fmt.Errorf("importing limits: %w", limits)
	}
	if faults != nil {
		faults = fmt.Errorf("importing faults: %w", faults)
	}
	return errors.Join(limits, faults)
}
