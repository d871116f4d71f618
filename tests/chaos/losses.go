package main

import (
	"context"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	pinDir         = "/sys/fs/bpf/ctrlmesh"
	lossesMetric   = "ctrlmesh_agent_redirection_losses_total"
	repairedMetric = "ctrlmesh_agent_redirection_repaired_total"
)

// loss is a way to take redirections from a node without asking its agent.
type loss struct {
	name   string
	way    string // whose members lose it
	strike func(ctx context.Context, w *world, node string) error
	mended func(ctx context.Context, w *world, node string) error // nil where clients tell
}

var lossKinds = []loss{
	{"links detached", "ebpf", tool("detach", pinDir), nil},
	{"pods' entries deleted", "ebpf", tool("empty", pinDir, "pods"), nil},
	{"destinations deleted", "ebpf", tool("empty", pinDir, "destinations"), nil},
	{"bpffs wiped", "ebpf", func(ctx context.Context, w *world, node string) error {
		_, err := w.NodeExec(ctx, node, "bash", "-c", `find /sys/fs/bpf -mindepth 1 -maxdepth 1 ! -name '*.debug' -exec rm -r {} +`)
		return err
	}, tool("inventory", pinDir)},
	{"rules flushed", "iptables", inNetns("iptables", "-t", "nat", "-F"), nil},
}

// tool returns what runs this program on a node.
func tool(args ...string) func(context.Context, *world, string) error {
	return func(ctx context.Context, w *world, node string) error {
		_, err := w.onNode(ctx, node, args...)
		return err
	}
}

// inNetns returns what runs a command in the network of each pod of a node that is
// captured by iptables.
func inNetns(command ...string) func(context.Context, *world, string) error {
	return func(ctx context.Context, w *world, node string) error {
		for _, m := range w.members {
			if m.Spec.NodeName != node || m.way != "iptables" {
				continue
			}
			if _, err := w.inNetns(ctx, m.Pod, command...); err != nil {
				return err
			}
		}
		return nil
	}
}

// onNode runs this program's other half on a node.
func (w *world) onNode(ctx context.Context, node string, args ...string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding this program: %w", err)
	}
	return w.NodeExec(ctx, node, append([]string{self, onNodeCommand}, args...)...)
}

// inNetns runs a node's command in the network of a pod.
func (w *world) inNetns(ctx context.Context, pod *corev1.Pod, command ...string) (string, error) {
	const enter = `uid=$1; shift
for p in /proc/[0-9]*; do
  if grep -qs "pod$uid" "$p/cgroup"; then exec nsenter --net="$p/ns/net" "$@"; fi
done
echo "no process of pod $uid" >&2; exit 1`
	return w.NodeExec(ctx, pod.Spec.NodeName, append([]string{"bash", "-c", enter, "bash", string(pod.UID)}, command...)...)
}

// losses takes the redirections away, again and again. Each must be noticed and
// mended in time, by what the agent holds and no restart, and be counted.
func losses(ctx context.Context, w *world, r *result) error {
	members, err := w.fleet(ctx, r)
	if err != nil {
		return err
	}
	begun, err := w.mark()
	if err != nil {
		return err
	}
	for i := range wantHookLoss {
		kind := lossKinds[i%len(lossKinds)]
		node := w.nodes[i/len(lossKinds)%2]
		r.losses++
		took, err := w.lose(ctx, kind, node)
		if err != nil {
			r.doubt("losses: %s on %s: %v", kind.name, node, err)
			w.say("  ! %s on %s: %v", kind.name, node, err)
			// One that stays lost must not be taken for the next.
			if err := w.fleetWorks(ctx, time.Now()); err != nil {
				return err
			}
			continue
		}
		r.repaired++
		w.say("  %s on %s: mended after %v", kind.name, node, took.Round(10*time.Millisecond))
	}
	if err := w.fleetWorks(ctx, time.Now()); err != nil {
		return err
	}
	// Members under Closed trust nobody else: without redirection nothing is asked.
	requests, err := w.requests(begun, ids(of(members, closed))...)
	if err != nil {
		return err
	}
	leaked, err := w.leaks(ctx, requests, nil)
	r.leaked += len(leaked)
	return err
}

// lose strikes, and says how long it took until the agent said that it had mended
// it and the members' clients met the mesh again.
func (w *world) lose(ctx context.Context, kind loss, node string) (time.Duration, error) {
	lost, err := w.metric(ctx, node, lossesMetric)
	if err != nil {
		return 0, err
	}
	repaired, err := w.metric(ctx, node, repairedMetric)
	if err != nil {
		return 0, err
	}
	if err := kind.strike(ctx, w, node); err != nil {
		return 0, err
	}
	struck := time.Now()
	inTime, cancel := context.WithDeadline(ctx, struck.Add(maxRepair))
	defer cancel()
	err = kube.Until(inTime, "repair", func(ctx context.Context) error {
		for name, before := range map[string]float64{lossesMetric: lost, repairedMetric: repaired} {
			now, err := w.metric(ctx, node, name)
			if err != nil {
				return err
			}
			if now <= before {
				return fmt.Errorf("%s is still %v", name, now)
			}
		}
		if kind.mended != nil {
			return kind.mended(ctx, w, node)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	worst := time.Now()
	for _, m := range w.members {
		if m.Spec.NodeName != node || m.way != kind.way {
			continue
		}
		last, err := m.settled(ctx, struck)
		if err != nil {
			return 0, err
		}
		if last.After(struck.Add(maxRepair)) {
			return 0, fmt.Errorf("%s did not meet the mesh for %v", m.Name, last.Sub(struck))
		}
		if last.After(worst) {
			worst = last
		}
	}
	return worst.Sub(struck), nil
}

// settled waits until a member met the mesh in some new connections in a row, and
// says when it last began one since a time that did not meet it.
func (m *member) settled(ctx context.Context, since time.Time) (last time.Time, err error) {
	const enough = 6
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = kube.Until(ctx, m.Name+" to meet the mesh", func(context.Context) error {
		all, err := m.asked()
		if err != nil {
			return kube.Never(err)
		}
		last = since
		good, example := 0, ""
		for _, b := range stretch(all, since, time.Now()) {
			switch {
			case b.Kind != freshKind:
			case b.meshed():
				good++
			default:
				good, example = 0, b.String()
				if b.Start.After(last) {
					last = b.Start
				}
			}
		}
		if good < enough {
			return fmt.Errorf("%d in a row; %s", good, example)
		}
		return nil
	})
	return last, err
}
