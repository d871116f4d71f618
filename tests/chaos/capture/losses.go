package capture

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/onnode"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	pinDir         = "/sys/fs/bpf/ctrlmesh"
	lossesMetric   = "ctrlmesh_agent_redirection_losses_total"
	repairedMetric = "ctrlmesh_agent_redirection_repaired_total"
)

// loss is a way to remove redirections from a node behind its agent's back.
type loss struct {
	name   string
	mode   string // of the members that lose their redirection
	remove func(ctx context.Context, s *suite, node string) error
	// repaired reports whether the loss is repaired, where clients cannot notice. May be nil.
	repaired func(ctx context.Context, s *suite, node string) error
}

var lossKinds = []loss{
	{"links detached", "ebpf", runOnNode("detach", pinDir), nil},
	{"pods' entries deleted", "ebpf", runOnNode("empty", pinDir, "pods"), nil},
	{"destinations deleted", "ebpf", runOnNode("empty", pinDir, "destinations"), nil},
	{"bpffs wiped", "ebpf", func(ctx context.Context, s *suite, node string) error {
		_, err := s.NodeExec(ctx, node, "bash", "-c", `find /sys/fs/bpf -mindepth 1 -maxdepth 1 ! -name '*.debug' -exec rm -r {} +`)
		return err
	}, runOnNode("inventory", pinDir)},
	{"rules flushed", "iptables", inNetns("iptables", "-t", "nat", "-F"), nil},
	{"a rule before them", "iptables", inNetns("iptables", "-t", "nat", "-I", "OUTPUT", "1", "-p", "tcp", "-j", "ACCEPT"), nil},
}

// runOnNode returns a function that runs a command of package onnode.
func runOnNode(args ...string) func(context.Context, *suite, string) error {
	return func(ctx context.Context, s *suite, node string) error {
		_, err := s.onNode(ctx, node, args...)
		return err
	}
}

// inNetns returns a function that runs a command in the network namespace of each pod of a
// node that is captured by iptables.
func inNetns(command ...string) func(context.Context, *suite, string) error {
	return func(ctx context.Context, s *suite, node string) error {
		for _, m := range s.fleet.Members {
			if m.Spec.NodeName != node || m.Mode != "iptables" {
				continue
			}
			if _, err := s.NetnsExec(ctx, m.Pod, command...); err != nil {
				return err
			}
		}
		return nil
	}
}

// onNode runs this program on a node, with a command of package onnode.
func (s *suite) onNode(ctx context.Context, node string, args ...string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this program: %w", err)
	}
	return s.NodeExec(ctx, node, append([]string{self, onnode.Command}, args...)...)
}

// losses removes the redirections again and again. The agent must detect and repair each loss
// in time, without a restart, and count it.
func (s *suite) losses(ctx context.Context) error {
	if err := s.startFleet(ctx); err != nil {
		return err
	}
	begun, err := s.Mark()
	if err != nil {
		return err
	}
	for i := range wantLosses {
		kind := lossKinds[i%len(lossKinds)]
		node := s.Nodes[i/len(lossKinds)%2]
		s.counts.losses++
		took, err := s.lose(ctx, kind, node)
		if err != nil {
			s.Doubt("losses: %s on %s: %v", kind.name, node, err)
			s.Logf("  ! %s on %s: %v", kind.name, node, err)
			// A loss that persists must not count as the next one.
			if err := s.fleet.WaitServed(ctx, time.Now()); err != nil {
				return err
			}
			continue
		}
		s.counts.repaired++
		s.Logf("  %s on %s: repaired after %v", kind.name, node, took.Round(10*time.Millisecond))
	}
	if err := s.fleet.WaitServed(ctx, time.Now()); err != nil {
		return err
	}
	// Members under Closed trust the mesh alone: without redirection they send no request.
	_, leaked, err := s.fleet.LeaksOf(ctx, s.fleet.Under(fleet.Closed), begun, nil)
	s.counts.leaked += len(leaked)
	return err
}

// lose removes a redirection. It returns how long it took until the agent had counted the loss
// and its repair and the members used the mesh again.
func (s *suite) lose(ctx context.Context, kind loss, node string) (time.Duration, error) {
	before := map[string]float64{}
	for _, name := range []string{lossesMetric, repairedMetric} {
		n, err := s.Metric(ctx, node, name)
		if err != nil {
			return 0, err
		}
		before[name] = n
	}
	if err := kind.remove(ctx, s, node); err != nil {
		return 0, err
	}
	removed := time.Now()
	inTime, cancel := context.WithDeadline(ctx, removed.Add(maxRepair))
	defer cancel()
	err := kube.Until(inTime, "repair", func(ctx context.Context) error {
		for name, n := range before {
			now, err := s.Metric(ctx, node, name)
			if err != nil {
				return err
			}
			if now <= n {
				return fmt.Errorf("%s is still %v", name, now)
			}
		}
		if kind.repaired != nil {
			return kind.repaired(ctx, s, node)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	worst := time.Now()
	for _, m := range s.fleet.Members {
		if m.Spec.NodeName != node || m.Mode != kind.mode {
			continue
		}
		last, err := m.WaitViaMesh(ctx, removed)
		if err != nil {
			return 0, err
		}
		if last.After(removed.Add(maxRepair)) {
			return 0, fmt.Errorf("%s did not meet the mesh for %v", m.Name, last.Sub(removed))
		}
		if last.After(worst) {
			worst = last
		}
	}
	return worst.Sub(removed), nil
}
