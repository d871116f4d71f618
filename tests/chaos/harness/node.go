package harness

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// NodeScript runs tests/cluster/node.sh, which stops and starts nodes and components.
func (w *Testbed) NodeScript(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, filepath.Join(w.Root, "tests", "cluster", "node.sh"), args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("node.sh %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// NetnsExec runs a command of the node in the network namespace of a pod. It is that of the
// pod's sandbox: children of an agent may be in the namespaces of other pods.
func (w *Testbed) NetnsExec(ctx context.Context, pod *corev1.Pod, command ...string) (string, error) {
	const enter = `uid=$1; shift
for p in /proc/[0-9]*; do
  if grep -qs "pod$uid" "$p/cgroup" && [ "$(cat "$p/comm")" = pause ]; then exec nsenter --net="$p/ns/net" "$@"; fi
done
echo "no sandbox of pod $uid" >&2; exit 1`
	return w.NodeExec(ctx, pod.Spec.NodeName, append([]string{"bash", "-c", enter, "bash", string(pod.UID)}, command...)...)
}

// Signal sends a signal to a process of a node, and returns when. Nodes share the clock of the
// machine.
func (w *Testbed) Signal(ctx context.Context, node, pid, signal string) (time.Time, error) {
	out, err := w.NodeExec(ctx, node, "bash", "-c", `kill -"$1" "$2" && echo "${EPOCHREALTIME/,/.}"`, "bash", signal, pid)
	if err != nil {
		return time.Time{}, err
	}
	seconds, err := strconv.ParseFloat(strings.TrimSpace(out), 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading the time of a signal: %w", err)
	}
	return time.UnixMicro(int64(seconds * 1e6)), nil
}

// KillProcess sends SIGKILL to the process of the given name in a pod, as the OOM killer does.
func (w *Testbed) KillProcess(ctx context.Context, pod *corev1.Pod, name string) (time.Time, error) {
	const find = `for p in $(pidof "$2"); do
  if grep -qs "pod$1" "/proc/$p/cgroup"; then echo "$p"; exit; fi
done
echo "no $2 runs in pod $1" >&2; exit 1`
	pid, err := w.NodeExec(ctx, pod.Spec.NodeName, "bash", "-c", find, "bash", string(pod.UID), name)
	if err != nil {
		return time.Time{}, err
	}
	return w.Signal(ctx, pod.Spec.NodeName, strings.TrimSpace(pid), "KILL")
}
