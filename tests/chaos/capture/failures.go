package capture

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
)

// failures restarts what the mesh depends on, one after the other. Afterwards all members work
// again, and meanwhile no member under Closed bypassed the mesh.
func (s *suite) failures(ctx context.Context) error {
	if err := s.startFleet(ctx); err != nil {
		return err
	}
	begun, err := s.Mark()
	if err != nil {
		return err
	}
	// When agents, and the reader of their logs, may have exited without a last log line.
	var cuts []time.Time
	last := s.Nodes[1]
	for _, f := range []struct {
		name  string
		steps [][]string // of node.sh
		cuts  bool       // by the first step
	}{
		{"containerd on " + s.Nodes[0], [][]string{{"restart", s.Nodes[0], "containerd"}}, true},
		{"the apiserver", [][]string{{"stop", "kube-apiserver"}, {"start", "kube-apiserver"}}, false},
		{last + ", as by a power failure", [][]string{{"stop", last}, {"start", last}}, true},
	} {
		start := time.Now()
		for i, step := range f.steps {
			began := time.Now()
			if err := s.NodeScript(ctx, step...); err != nil {
				return err
			}
			if f.cuts && i == 0 { // at an unknown time of the step
				for at := began; at.Before(time.Now()); at = at.Add(100 * time.Millisecond) {
					cuts = append(cuts, at)
				}
			}
		}
		if err := s.Until(ctx, "the nodes' return", s.nodesReady); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		if err := s.fleet.WaitWorking(ctx); err != nil {
			return fmt.Errorf("after a restart of %s: %w", f.name, err)
		}
		if err := s.Until(ctx, "the mesh's return", s.MeshReady); err != nil {
			return fmt.Errorf("after a restart of %s: %w", f.name, err)
		}
		s.Logf("  restarted %s: all work after %v", f.name, time.Since(start).Round(100*time.Millisecond))
	}
	requests, err := s.PodRequests(begun, fleet.IDs(s.fleet.Under(fleet.Closed))...)
	if err != nil {
		return err
	}
	leaked, err := s.fleet.Leaks(ctx, requests, cuts)
	s.counts.leaked += len(leaked)
	s.Logf("  of %d requests of members under Closed %d bypassed the mesh", len(requests), len(leaked))
	return err
}

// nodesReady returns an error that names a node that is not ready.
func (s *suite) nodesReady(ctx context.Context) error {
	for _, name := range s.Nodes {
		var node corev1.Node
		if err := s.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
			return err
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				return fmt.Errorf("%s: %s", name, c.Message)
			}
		}
	}
	return nil
}
