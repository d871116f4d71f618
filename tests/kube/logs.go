package kube

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// Where the mesh is installed.
const (
	SystemNamespace = "ctrlmesh-system"
	AgentName       = "ctrlmesh-agent"   // DaemonSet
	ManagerName     = "ctrlmesh-manager" // Deployment
)

// PodLogs returns the logs of all containers of a pod, those before a restart
// included, each under a heading.
func (c *Cluster) PodLogs(ctx context.Context, namespace, name string) (string, error) {
	pod := &corev1.Pod{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pod); err != nil {
		return "", fmt.Errorf("reading logs: %w", err)
	}
	var out strings.Builder
	for _, container := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
		for _, previous := range []bool{true, false} {
			text, err := c.Clientset.CoreV1().Pods(namespace).
				GetLogs(name, &corev1.PodLogOptions{Container: container.Name, Previous: previous}).DoRaw(ctx)
			if apierrors.IsBadRequest(err) { // it never ran, or was never restarted
				continue
			}
			if err != nil {
				return out.String(), fmt.Errorf("reading logs of %s/%s, container %s: %w", namespace, name, container.Name, err)
			}
			when := ""
			if previous {
				when = ", before its restart"
			}
			fmt.Fprintf(&out, "==> %s/%s, container %s%s\n%s\n", namespace, name, container.Name, when, text)
		}
	}
	return out.String(), nil
}

// AccessLines returns the access lines of all agents.
func (c *Cluster) AccessLines() ([]audit.Access, error) {
	var out []audit.Access
	err := c.MeshLogs(AgentName, func(_ string, log io.Reader) error {
		lines, err := audit.AccessLines(log)
		out = append(out, lines...)
		return err
	})
	return out, err
}

// MeshLogs visits the logs of a workload of the mesh, from the files of its
// containers on the nodes' disks: kubectl logs would show the newest file only.
func (c *Cluster) MeshLogs(workload string, visit func(file string, log io.Reader) error) error {
	// .run/NODE/pods is /var/log/pods of a node: NAMESPACE_POD_UID/CONTAINER/N.log, N.log.TIME, N.log.TIME.gz
	files, err := filepath.Glob(filepath.Join(c.Root, ".run", "*", "pods", SystemNamespace+"_"+workload+"-*", "*", "*.log*"))
	if err != nil {
		return fmt.Errorf("finding logs: %w", err)
	}
	for _, file := range files {
		err := visitLog(file, visit)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // rotated meanwhile: the next call finds its lines in another file
			return fmt.Errorf("reading %s: %w", file, err)
		}
	}
	return nil
}

func visitLog(file string, visit func(string, io.Reader) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var log io.Reader = f
	if strings.HasSuffix(file, ".gz") {
		if log, err = gzip.NewReader(f); err != nil {
			return err
		}
	}
	return visit(file, log)
}

// LogDelay is how much later than the apiserver's record an access line may be written, on a
// busy machine.
const LogDelay = 30 * time.Second

// Traffic has the requests of callers, and those of them that bypassed the mesh.
type Traffic struct {
	Requests []audit.Request
	Lines    int // access lines of all agents, for all callers
	Leaked   []audit.Request
}

// Traffic compares the callers' requests up to now with the agents' access lines.
// It reads the lines again for up to [LogDelay] before it reports a leak.
func (c *Cluster) Traffic(ctx context.Context, of audit.Callers) (*Traffic, error) {
	requests, err := c.Requests(of)
	if err != nil {
		return nil, err
	}
	t := &Traffic{Requests: requests}
	ctx, cancel := context.WithTimeout(ctx, LogDelay)
	defer cancel()
	var failed error
	_ = Until(ctx, "access lines", func(context.Context) error {
		lines, err := c.AccessLines()
		if err != nil {
			failed = err
			return err
		}
		failed, t.Lines, t.Leaked = nil, len(lines), audit.Leaked(requests, lines)
		if len(t.Leaked) > 0 {
			return fmt.Errorf("%d are missing", len(t.Leaked))
		}
		return nil
	})
	return t, failed
}
