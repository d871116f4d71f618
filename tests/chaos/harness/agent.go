package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// AgentPID returns the process id of the agent on a node, in the node's PID namespace. It
// fails unless exactly one agent runs.
func (w *Testbed) AgentPID(ctx context.Context, node string) (string, error) {
	out, err := w.NodeExec(ctx, node, "pidof", "ctrlmesh-agent")
	if err != nil {
		return "", fmt.Errorf("no agent runs: %w", err)
	}
	pids := strings.Fields(out)
	if len(pids) != 1 {
		return "", fmt.Errorf("%d agents run on %s", len(pids), node)
	}
	return pids[0], nil
}

// WaitAgentRestart waits for an agent other than process pid, and returns when its process
// started.
func (w *Testbed) WaitAgentRestart(ctx context.Context, node, pid string) (started time.Time, err error) {
	const age = `pid=$(pidof ctrlmesh-agent) || exit 1
[ "$pid" != "$1" ] || exit 1
read -r up _ </proc/uptime
set -- $(cat /proc/"$pid"/stat) && echo "$up ${22}"`
	err = w.Until(ctx, "the agent's return", func(ctx context.Context) error {
		out, err := w.NodeExec(ctx, node, "bash", "-c", age, "bash", pid)
		if err != nil {
			return errors.New("it is not back")
		}
		started, err = startTime(out, time.Now())
		return err
	})
	return started, err
}

// startTime parses the uptime of the machine in seconds and the start of a process in ticks of
// 10 ms after boot.
func startTime(text string, now time.Time) (time.Time, error) {
	fields := strings.Fields(text)
	if len(fields) != 2 {
		return time.Time{}, fmt.Errorf("not two numbers: %q", text)
	}
	up, err := strconv.ParseFloat(fields[0], 64)
	start, err2 := strconv.ParseFloat(fields[1], 64)
	if err := errors.Join(err, err2); err != nil {
		return time.Time{}, fmt.Errorf("reading when the agent began: %w", err)
	}
	return now.Add(-time.Duration((up - start/100) * float64(time.Second))), nil
}

// managerPort is the port of managers that agents connect to.
const managerPort = "8443"

// CutOffAgent drops all packets between a node's agent and the managers, and returns a function that ends it. The
// caller must call it unless it is nil, even with an error.
func (w *Testbed) CutOffAgent(ctx context.Context, node string) (restore func() error, err error) {
	agent, err := w.AgentPod(ctx, node)
	if err != nil {
		return nil, err
	}
	rules := func(ctx context.Context, do string) error {
		for _, rule := range [][]string{{"OUTPUT", "-p", "tcp", "--dport"}, {"INPUT", "-p", "tcp", "--sport"}} {
			if _, err := w.NetnsExec(ctx, agent, append(append([]string{"iptables", do}, rule...), managerPort, "-j", "DROP")...); err != nil {
				return err
			}
		}
		return nil
	}
	return func() error { return rules(context.WithoutCancel(ctx), "-D") }, rules(ctx, "-I")
}

// RestartAgents replaces all agents by a rolling update, and waits until the old ones have
// exited.
func (w *Testbed) RestartAgents(ctx context.Context) error {
	if _, err := w.Kubectl(ctx, "-n", kube.SystemNamespace, "rollout", "restart", "daemonset/"+kube.AgentName); err != nil {
		return err
	}
	return w.waitAgentsReplaced(ctx)
}

// WithAgentArgs runs do while the agents have other arguments in addition to their own. They are
// replaced by a rolling update, before and after.
func (w *Testbed) WithAgentArgs(ctx context.Context, args []string, do func(context.Context) error) error {
	agents := kube.Agents()
	if err := w.Get(ctx, client.ObjectKeyFromObject(agents), agents); err != nil {
		return err
	}
	own := agents.Spec.Template.Spec.Containers[0].Args
	set := func(args []string) func(context.Context) error {
		return func(ctx context.Context) error {
			patch, err := json.Marshal([]map[string]any{{"op": "add", "path": "/spec/template/spec/containers/0/args", "value": args}})
			if err != nil {
				return err
			}
			if err := w.Patch(ctx, kube.Agents(), client.RawPatch(types.JSONPatchType, patch)); err != nil {
				return err
			}
			return w.waitAgentsReplaced(ctx)
		}
	}
	err := kube.InOrder(ctx, set(slices.Concat(own, args)), do)
	return errors.Join(err, set(own)(context.WithoutCancel(ctx)))
}

// waitAgentsReplaced waits until a rolling update of the agents is complete.
func (w *Testbed) waitAgentsReplaced(ctx context.Context) error {
	if _, err := w.Kubectl(ctx, "-n", kube.SystemNamespace, "rollout", "status", "daemonset/"+kube.AgentName, "--timeout=120s"); err != nil {
		return err
	}
	return w.Until(ctx, "the old agents' end", w.oneAgentEach)
}

// oneAgentEach returns an error unless exactly one agent runs on each node.
func (w *Testbed) oneAgentEach(ctx context.Context) error {
	for _, node := range w.Nodes {
		if _, err := w.AgentPID(ctx, node); err != nil {
			return err
		}
	}
	return nil
}
