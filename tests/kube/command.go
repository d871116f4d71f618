package kube

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Exec runs a command in a container of a pod; the container's name may be empty if there is
// only one. It returns the command's output even if the command fails.
func (c *Cluster) Exec(ctx context.Context, namespace, pod, container string, command ...string) (stdout, stderr string, err error) {
	var out bytes.Buffer
	stderr, err = c.execTo(ctx, &out, namespace, pod, container, command...)
	return out.String(), stderr, err
}

// ExecLines runs a command in a pod of one container and calls f with each line
// as it is printed, until the command or ctx ends. It returns no error when ctx ends.
func (c *Cluster) ExecLines(ctx context.Context, namespace, pod string, f func(line string), command ...string) error {
	read, write := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		lines := bufio.NewScanner(read)
		lines.Buffer(nil, maxLine)
		for lines.Scan() {
			f(lines.Text())
		}
		_ = read.CloseWithError(lines.Err())
	}()
	_, err := c.execTo(ctx, write, namespace, pod, "", command...)
	_ = write.Close()
	<-done
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// maxLine is larger than any answer of the apiserver that tests print.
const maxLine = 4 << 20

func (c *Cluster) execTo(ctx context.Context, stdout io.Writer, namespace, pod, container string, command ...string) (stderr string, err error) {
	executor, err := c.executor(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true}, namespace, pod)
	if err != nil {
		return "", err
	}
	var errOut bytes.Buffer
	if err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: stdout, Stderr: &errOut}); err != nil {
		err = fmt.Errorf("%q in %s/%s: %w: %s", strings.Join(command, " "), namespace, pod, err, tail(errOut.String()))
	}
	return errOut.String(), err
}

func (c *Cluster) executor(o *corev1.PodExecOptions, namespace, pod string) (remotecommand.Executor, error) {
	url := c.Clientset.CoreV1().RESTClient().Post().
		Namespace(namespace).Resource("pods").Name(pod).SubResource("exec").
		VersionedParams(o, clientgoscheme.ParameterCodec).URL()
	executor, err := remotecommand.NewWebSocketExecutor(c.Config, "GET", url.String())
	return executor, failure.Wrap(err, "preparing exec in %s/%s", namespace, pod)
}

// NodeExec runs a command on a node of the tests' cluster.
func (c *Cluster) NodeExec(ctx context.Context, node string, command ...string) (string, error) {
	script := filepath.Join(c.Root, "tests", "cluster", "node.sh")
	cmd := exec.CommandContext(ctx, script, append([]string{"exec", node}, command...)...)
	return output(cmd, fmt.Sprintf("%q on %s", strings.Join(command, " "), node))
}

// output runs cmd and returns its stdout; errors contain the end of its stderr.
func output(cmd *exec.Cmd, what string) (string, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", what, err, tail(stderr.String()))
	}
	return string(out), err
}

// tail returns the end of a text.
func tail(s string) string {
	const enough = 2000
	s = strings.TrimSpace(s)
	if len(s) > enough {
		s = "..." + s[len(s)-enough:]
	}
	return s
}
