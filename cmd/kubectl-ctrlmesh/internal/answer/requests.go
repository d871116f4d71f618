package answer

import (
	"context"
	"fmt"
	"io"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
)

const (
	// tail and tailBytes bound what is read of a log to find the last requests of a pod, in lines and bytes.
	tail      = 2000
	tailBytes = 2 << 20
)

// Requests returns the last requests of the pod, at most n, the newest first. It looks for them in the last
// lines of the log of its agent.
func (p Pod) Requests(ctx context.Context, n int) ([]tap.Line, error) {
	if err := p.s.Requires(snapshot.Programs); err != nil {
		return nil, snapshot.Unreadable(err)
	}
	agent, err := tap.Agent(p.s, p.name.Namespace, p.name.Name)
	if err != nil {
		return nil, err
	}
	log, err := Log(ctx, p.reader, agent, &corev1.PodLogOptions{TailLines: new(int64(tail))})
	if err != nil {
		return nil, err
	}
	defer log.Close()
	last := []tap.Line{} // the oldest first
	err = tap.Lines(io.LimitReader(log, tailBytes), func(text []byte) error {
		if line, ok := tap.Parse(text); ok && line.Pod == p.name.String() {
			if len(last) == n {
				last = slices.Delete(last, 0, 1)
			}
			last = append(last, line)
		}
		return nil
	})
	slices.Reverse(last)
	return last, err
}

// Log returns the log of an agent.
func Log(ctx context.Context, r snapshot.Reader, agent *corev1.Pod, options *corev1.PodLogOptions) (io.ReadCloser, error) {
	log, err := r.Logs(ctx, agent.Namespace, agent.Name, options)
	if err != nil {
		return nil, fmt.Errorf("reading the log of %s: %w: you need permission to get pods/log in namespace %s", agent.Name, err, agent.Namespace)
	}
	return log, nil
}
