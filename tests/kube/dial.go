package kube

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/remotecommand"
)

// DialFrom connects to a literal address from inside a pod, so that the connection is
// redirected and filtered like any of the pod. The pod's first container must have nc. The
// connection is returned at once; if connecting fails, the first read returns the error.
func (c *Cluster) DialFrom(ctx context.Context, pod *corev1.Pod, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("connecting from %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	executor, err := c.executor(&corev1.PodExecOptions{
		Container: pod.Spec.Containers[0].Name,
		Command:   []string{"nc", host, port}, Stdin: true, Stdout: true, Stderr: true,
	}, pod.Namespace, pod.Name)
	if err != nil {
		return nil, err
	}
	// The connection outlives ctx, which may end with the attempt to connect.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	near, far := net.Pipe()
	conn := &podConn{Conn: near, hangUp: cancel, ended: make(chan struct{})}
	go func() {
		var stderr bytes.Buffer
		err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: far, Stdout: far, Stderr: &stderr})
		if err != nil && ctx.Err() == nil {
			conn.err = fmt.Errorf("connecting from %s/%s: %w: %s", pod.Namespace, pod.Name, err, strings.TrimSpace(stderr.String()))
		}
		close(conn.ended)
		_ = far.Close()
	}()
	return conn, nil
}

// podConn is a connection made by nc in a pod.
type podConn struct {
	net.Conn
	hangUp func()
	once   sync.Once
	ended  chan struct{}
	err    error // why it ended, once it has
}

// Read returns the reason for which nc ended, instead of io.EOF.
func (c *podConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	return n, c.because(err)
}

// Write returns the reason for which nc ended, instead of io.ErrClosedPipe.
func (c *podConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	return n, c.because(err)
}

// because replaces an error by its cause, if nc has failed.
func (c *podConn) because(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-c.ended:
		return cmp.Or(c.err, err)
	default: // a deadline, or closed on this side
		return err
	}
}

// Close ends nc as well.
func (c *podConn) Close() error {
	c.once.Do(c.hangUp)
	return c.Conn.Close()
}
