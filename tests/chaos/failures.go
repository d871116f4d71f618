package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// failures restarts what the mesh stands on, one after the other. Afterwards all
// members work again, and nobody under Closed went around the mesh meanwhile.
func failures(ctx context.Context, w *world, r *result) error {
	members, err := w.fleet(ctx, r)
	if err != nil {
		return err
	}
	begun, err := w.mark()
	if err != nil {
		return err
	}
	// When agents, and what reads their lines, may have ended without a last word.
	var cuts []time.Time
	last := w.nodes[1]
	for _, f := range []struct {
		name  string
		steps [][]string // of node.sh
		cuts  bool       // by the first step
	}{
		{"containerd on " + w.nodes[0], [][]string{{"restart", w.nodes[0], "containerd"}}, true},
		{"the apiserver", [][]string{{"stop", "kube-apiserver"}, {"start", "kube-apiserver"}}, false},
		{last + ", as by a power failure", [][]string{{"stop", last}, {"start", last}}, true},
	} {
		start := time.Now()
		for i, step := range f.steps {
			began := time.Now()
			if err := w.nodeScript(ctx, step...); err != nil {
				return err
			}
			if f.cuts && i == 0 { // at some time in between
				for at := began; at.Before(time.Now()); at = at.Add(100 * time.Millisecond) {
					cuts = append(cuts, at)
				}
			}
		}
		if err := w.until(ctx, "the nodes' return", w.nodesReady); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		if err := w.fleetWorks(ctx, time.Now()); err != nil {
			return fmt.Errorf("after a restart of %s: %w", f.name, err)
		}
		if err := w.informersWork(ctx); err != nil {
			return fmt.Errorf("after a restart of %s: %w", f.name, err)
		}
		if err := w.until(ctx, "the mesh's return", w.meshReady); err != nil {
			return fmt.Errorf("after a restart of %s: %w", f.name, err)
		}
		w.say("  restarted %s: all work after %v", f.name, time.Since(start).Round(100*time.Millisecond))
	}
	requests, err := w.requests(begun, ids(of(members, closed))...)
	if err != nil {
		return err
	}
	leaked, err := w.leaks(ctx, requests, cuts)
	r.leaked += len(leaked)
	w.say("  of %d requests of members under Closed %d went around the mesh", len(requests), len(leaked))
	return err
}

func (w *world) nodeScript(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, filepath.Join(w.Root, "tests", "cluster", "node.sh"), args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("node.sh %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// nodesReady says which node is not.
func (w *world) nodesReady(ctx context.Context) error {
	for _, name := range w.nodes {
		var node corev1.Node
		if err := w.Get(ctx, client.ObjectKey{Name: name}, &node); err != nil {
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
