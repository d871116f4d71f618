package capture

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

const (
	batch        = 40 // pods at a time: two nodes take 110 each
	burners      = 1  // per node, of the two that share the machine's processors
	startsConfig = "starts"
)

var starters = client.MatchingLabels{harness.PolicyLabel: startsConfig, "app": startsConfig}

// starts runs many pods whose first instruction is a request, on nodes without idle
// processors. None may see more than its shard or bypass the mesh, however late the agent
// learns of it.
func (s *suite) starts(ctx context.Context) error {
	home, err := s.CreatePodNamespace(ctx, "starts")
	if err != nil {
		return err
	}
	owns, err := s.fleet.CreateShard(ctx, home, startsConfig, meshv1alpha1.FailClosed)
	if err != nil {
		return err
	}
	if err := s.startKeepers(ctx, home); err != nil {
		return err
	}
	if err := s.burn(ctx, home); err != nil {
		return err
	}
	for begun := 0; begun < wantStarts; begun += batch {
		if err := s.startBatch(ctx, home, owns, begun, min(begun+batch, wantStarts)); err != nil {
			return err
		}
	}
	// The other parts need the processors.
	return failure.Wrap(s.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: home}}), "removing the burners")
}

// startKeepers starts a pod that stays, in each mode: the status names pods that exit only for
// a short time.
func (s *suite) startKeepers(ctx context.Context, home string) error {
	for _, mode := range fleet.Modes {
		p := harness.NewPod(home, "keeper-"+mode, startsConfig, mode, s.Nodes[0], "sleep", "1000000")
		p.Spec.Containers[0].Image = harness.NetImage
		if err := s.CreateAll(ctx, p); err != nil {
			return err
		}
	}
	return s.Until(ctx, "pods to be captured as they asked", func(ctx context.Context) error {
		captured, err := s.fleet.CapturedModes(ctx, home, startsConfig)
		if err != nil {
			return err
		}
		for _, mode := range fleet.Modes {
			if got := captured["keeper-"+mode]; got != mode {
				return fmt.Errorf("the pod for mode %s is captured by %q", mode, got)
			}
			s.counts.captured(mode)
		}
		return nil
	})
}

// burn keeps the nodes' processors busy, with a CPU request that competes with the members.
func (s *suite) burn(ctx context.Context, home string) error {
	for _, node := range s.Nodes[:2] {
		for i := range burners {
			p := harness.NewPlainPod(home, fmt.Sprintf("burner-%s-%d", node, i), harness.NetImage, node, "sh", "-c", "while :; do :; done")
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("250m")}
			if err := s.CreateAll(ctx, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// startBatch runs the pods with the numbers in [from, to) and checks what they saw.
func (s *suite) startBatch(ctx context.Context, home, owns string, from, to int) error {
	begun, err := s.Mark()
	if err != nil {
		return err
	}
	var all []string
	for i := from; i < to; i++ {
		// Neighbours in number differ in mode and, by threes, in node.
		p := starter(home, fmt.Sprintf("start-%03d", i), fleet.Modes[i%len(fleet.Modes)], s.Nodes[i/len(fleet.Modes)%2])
		if err := s.CreateAll(ctx, p); err != nil {
			return err
		}
		all = append(all, home+"/"+p.Name)
	}
	pods, awaited := s.awaitStarters(ctx, home)
	answered, again := s.checkStarters(pods, owns)
	requests, err := s.PodRequests(begun, all...)
	if err != nil {
		return err
	}
	if len(requests) < answered {
		s.Doubt("starts: %d pods were answered, and the audit log has %d requests", answered, len(requests))
	}
	leaked, err := s.fleet.Leaks(ctx, requests, nil)
	if err != nil {
		return err
	}
	s.counts.starts += answered
	s.counts.leaked += len(leaked)
	s.Logf("  %d pods: %d answered, of their own shard alone; %d tries were refused before; %d leaked", to-from, answered, again, len(leaked))
	if err := s.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(home), starters, client.GracePeriodSeconds(0)); err != nil {
		return errors.Join(awaited, fmt.Errorf("deleting pods: %w", err))
	}
	return awaited
}

// awaitStarters waits until all starters have succeeded. It returns them even with an error.
func (s *suite) awaitStarters(ctx context.Context, home string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := s.Until(ctx, "the pods to be answered", func(ctx context.Context) error {
		if err := s.List(ctx, &list, client.InNamespace(home), starters); err != nil {
			return err
		}
		var waiting []string
		for _, p := range list.Items {
			if p.Status.Phase != corev1.PodSucceeded {
				waiting = append(waiting, p.Name)
			}
		}
		if len(waiting) > 0 {
			return fmt.Errorf("%d were not: %s, for one", len(waiting), waiting[0])
		}
		return nil
	})
	return list.Items, err
}

// checkStarters returns how many starters saw their own shard alone, and how often
// starters were restarted.
func (s *suite) checkStarters(pods []corev1.Pod, owns string) (answered int, restarts int32) {
	for i := range pods {
		p := &pods[i]
		if len(p.Status.ContainerStatuses) > 0 {
			restarts += p.Status.ContainerStatuses[0].RestartCount
		}
		if p.Status.Phase != corev1.PodSucceeded {
			s.Doubt("starts: %s was not answered: %s", p.Name, s.lastLine(p))
			continue
		}
		seen, err := s.namespacesSeen(p)
		switch {
		case err != nil:
			s.Doubt("starts: %s: %v", p.Name, err)
		case !slices.Equal(seen, []string{owns}):
			s.Doubt("starts: %s (%s) saw %v, not %s alone", p.Name, p.Annotations[meshv1alpha1.CaptureAnnotation], seen, owns)
		default:
			answered++
		}
	}
	return answered, restarts
}
