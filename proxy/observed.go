package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/proxy/keep"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// HeldLocks returns the locks of the policy in force that the pod holds, sorted, as
// namespace/name: its last successful write of each named a holder, no longer ago than
// the lease lasts.
func (p *Pod) HeldLocks() (out []string) {
	pol := p.env.Policy.Load()
	if pol == nil {
		return nil
	}
	for _, l := range pol.Locks {
		if p.env.Observations.LockWrites.Holds(l) {
			out = append(out, l.Namespace()+"/"+l.Name())
		}
	}
	slices.Sort(out)
	return out
}

// LockHolder reports whether the pod holds all of its shard's locks.
func (p *Pod) LockHolder() bool {
	pol := p.env.Policy.Load()
	return pol != nil && len(pol.Locks) > 0 && len(p.HeldLocks()) == len(pol.Locks)
}

// Holders returns what the pod wrote last into each object of its locks, sorted by lock.
func (p *Pod) Holders() []lock.Holder { return p.env.Observations.LockWrites.Holders() }

// HolderWritten gets a token when Holders may have changed. The writer then waits
// for its answer.
func (p *Pod) HolderWritten() <-chan struct{} { return p.env.Observations.LockWrites.Changed() }

// ObservedLocks returns the locks, other than those of the policy in force, that the pod
// wrote or polled lately, sorted.
func (p *Pod) ObservedLocks() []lock.Observed {
	pol := p.env.Policy.Load()
	switch {
	case pol == nil:
		return nil
	case pol.Would != nil:
		pol = pol.Would
	}
	return p.env.Observations.Observed.Except(pol.Locks)
}

// LockRefusals returns the refusals of the apiserver that keep the pod from the locks of the policy
// in force, sorted by lock.
func (p *Pod) LockRefusals() []lock.Refusal {
	pol := p.env.Policy.Load()
	if pol == nil || pol.Division.Standby {
		return nil
	}
	return p.env.Observations.Refusals.Of(pol.Locks, time.Now())
}

// Methods returns how lists and watches of the resources that the policy in force divides,
// as resource.group, were narrowed last: "ServerSide", "Labels" or "Filter".
func (p *Pod) Methods() map[string]string {
	if pol := p.env.Policy.Load(); pol != nil {
		return p.env.Observations.Methods.Of(pol.Division)
	}
	return nil
}

// Activity returns what the pod wrote and watched lately, by resource; nothing for a while
// after a policy with another division.
func (p *Pod) Activity() []*meshv1.ResourceActivity {
	return p.env.Observations.Activity.Report(time.Now())
}

// Outcomes returns how the pod's requests have ended.
func (p *Pod) Outcomes() *meshv1.Outcomes { return p.env.Observations.Outcomes.Report() }

// Shadow returns how the writes of a shadow have ended; nil if the pod is none.
func (p *Pod) Shadow() *meshv1.ShadowReport {
	if pol := p.env.Policy.Load(); pol == nil || pol.Message.GetSharding().GetShadow() == nil {
		return nil
	}
	return p.env.Observations.Shadow.Report()
}

// Usage returns what the pod requested; nil if its requests do not pass unchanged.
func (p *Pod) Usage() *meshv1.Usage {
	if !p.env.Policy.Load().Observes() {
		return nil
	}
	return p.env.Observations.Usage.Report()
}

// RuleStates returns the states of the limits in force.
func (p *Pod) RuleStates() []*meshv1.RuleState { return p.env.Rules.Limits.States() }

// FaultStates returns the states of the faults in force.
func (p *Pod) FaultStates() []*meshv1.FaultState { return p.env.Rules.Faults.States() }

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
	limits, err := p.env.Rules.Limits.Export(now)
	if err != nil {
		return nil, fmt.Errorf("exporting limits: %w", err)
	}
	faults, err := p.env.Rules.Faults.Export(now)
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
	return errors.Join(
		failure.Wrap(p.env.Rules.Limits.Import(in.Limits, now), "importing limits"),
		failure.Wrap(p.env.Rules.Faults.Import(in.Faults, now), "importing faults"),
	)
}
