// Package traffic is the chaos suite of traffic policies: an operator under every fault and
// limit, and a pod whose requests to other hosts are allowed and denied.
package traffic

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// suite is the state of a run.
type suite struct {
	*operator.Operators
	counts counts
}

// New returns the traffic suite.
func New(w *harness.Testbed, r *harness.Result) harness.Suite {
	s := &suite{Operators: operator.New(w, r), counts: counts{limited: map[string]int{}, panics: map[types.UID]int{}}}
	return harness.Suite{
		Name: "traffic",
		Parts: []harness.Part{
			{Name: "faults", Run: s.faults},
			{Name: "egress", Run: s.egress},
		},
		Counts: func() []harness.Count { return s.counts.list(s.Counts) },
	}
}

// replaceAgents replaces the agents, after it has counted the panics of the old ones.
func (s *suite) replaceAgents(ctx context.Context) error {
	if err := kube.InOrder(ctx, s.countPanics, s.RestartAgents); err != nil {
		return err
	}
	s.counts.takeovers++
	return nil
}

// countPanics counts the panics of the agents that run, and the exits of their containers.
func (s *suite) countPanics(ctx context.Context) error {
	for _, node := range s.Nodes {
		agent, err := s.AgentPod(ctx, node)
		if err != nil {
			return err
		}
		families, err := s.Scrape(ctx, node)
		if err != nil {
			return err
		}
		if families["ctrlmesh_panics_total"] == nil {
			return kube.Never(fmt.Errorf("the agent on %s does not count panics", node))
		}
		s.counts.panics[agent.UID] = int(kube.Total(families["ctrlmesh_panics_total"], nil))
		for _, status := range agent.Status.ContainerStatuses {
			if t := status.LastTerminationState.Terminated; t != nil && t.FinishedAt.After(s.Started) {
				s.counts.panics[agent.UID]++
				s.Logf("  ! the agent on %s ended with status %d at %s", node, t.ExitCode, t.FinishedAt.UTC().Format(time.TimeOnly))
			}
		}
	}
	return nil
}
