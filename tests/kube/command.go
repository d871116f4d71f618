package kube

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
)

// Exec runs a command in a container of a pod; an empty name means the first one.
// What it printed is returned also when it failed.
func (c *Cluster) Exec(ctx context.Context, namespace, pod, container string, command ...string) (stdout, stderr string, err error) {
	url := c.Clientset.CoreV1().RESTClient().Post().
		Namespace(namespace).Resource("pods").Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true},
			clientgoscheme.ParameterCodec).URL()
	executor, err := remotecommand.NewWebSocketExecutor(c.Config, "GET", url.String())
	if err != nil {
		return "", "", fmt.Errorf("preparing exec in %s/%s: %w", namespace, pod, err)
	}
	var out, errOut bytes.Buffer
	if err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &errOut}); err != nil {
		err = fmt.Errorf("%q in %s/%s: %w: %s", strings.Join(command, " "), namespace, pod, err, tail(errOut.String()))
	}
	return out.String(), errOut.String(), err
}

// NodeExec runs a command on a node of the tests' cluster.
func (c *Cluster) NodeExec(ctx context.Context, node string, command ...string) (string, error) {
	script := filepath.Join(c.Root, "tests", "cluster", "node.sh")
	cmd := exec.CommandContext(ctx, script, append([]string{"exec", node}, command...)...)
	return output(cmd, fmt.Sprintf("%q on %s", strings.Join(command, " "), node))
}

// output runs cmd; a failure is told with the end of what it wrote to stderr.
func output(cmd *exec.Cmd, what string) (string, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", what, err, tail(stderr.String()))
	}
	return string(out), err
}

// tail is the end of a text, enough to see what went wrong.
func tail(s string) string {
	const enough = 2000
	s = strings.TrimSpace(s)
	if len(s) > enough {
		s = "..." + s[len(s)-enough:]
	}
	return s
}
