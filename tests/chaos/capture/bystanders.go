package capture

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// withBystander attacks and checks a member on the same node, which needs its agent meanwhile.
func (s *suite) withBystander(ctx context.Context, victim *fleet.Member, attack func(context.Context) (string, error)) (string, error) {
	const before = 3 * time.Second
	start := time.Now()
	node := victim.Spec.NodeName
	pid, err := s.AgentPID(ctx, node)
	if err != nil {
		return "", err
	}
	if _, err := victim.WaitRequest(ctx, "some calm", start.Add(before), fleet.Request.ViaMesh); err != nil {
		return "", err
	}
	calm, _, err := victim.Latency(start, time.Now())
	if err != nil {
		return "", err
	}

	began := time.Now()
	flooding, stop := context.WithCancel(ctx)
	defer stop()
	memory := make(chan int64, 1)
	go func() { memory <- s.peakMemory(flooding, node, pid) }()
	why, err := attack(flooding)
	stop()
	peak := <-memory
	if err != nil {
		return "", err
	}
	if after, err := s.AgentPID(ctx, node); err != nil || after != pid {
		return "", fmt.Errorf("the agent died of it: %w", errors.Join(err, errors.New("another runs")))
	}
	if _, err := victim.WaitRequest(ctx, "an answer after it", time.Now(), fleet.Request.ViaMesh); err != nil {
		return "", err
	}
	slow, failed, err := victim.Latency(began, time.Now())
	switch {
	case err != nil:
		return "", err
	case failed != "":
		return "", fmt.Errorf("a request of %s failed: %s", victim.Name, failed)
	case slow > max(maxLatency, maxSlower*calm):
		return "", fmt.Errorf("%s waited %v, %v before", victim.Name, slow, calm)
	case peak == 0 || peak > maxMeshMemory:
		return "", fmt.Errorf("the agent took %d MiB", peak>>20)
	}
	return fmt.Sprintf("%s; the agent took %d MiB, others waited %v, %v before", why, peak>>20, slow.Round(time.Millisecond), calm.Round(time.Millisecond)), nil
}

// peakMemory returns the most resident memory, in bytes, that a process was seen to have until
// ctx ended.
func (s *suite) peakMemory(ctx context.Context, node, pid string) (peak int64) {
	for ctx.Err() == nil {
		out, err := s.NodeExec(ctx, node, "grep", "VmRSS", "/proc/"+pid+"/status")
		if fields := strings.Fields(out); err == nil && len(fields) == 3 {
			if kib, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				peak = max(peak, kib<<10)
			}
		}
		_ = kube.Sleep(ctx, 250*time.Millisecond)
	}
	return peak
}

// withServices attacks and checks that agents and managers still serve others: a member on the
// victim's node, readers of metrics, and the apiserver that admits members.
func (s *suite) withServices(ctx context.Context, victim *fleet.Member, attack func(context.Context) (string, error)) (string, error) {
	before, err := s.restartCounts(ctx)
	if err != nil {
		return "", err
	}
	peaks := make([]int64, len(s.Nodes))
	attacked := func(ctx context.Context) (string, error) {
		var watching sync.WaitGroup
		watched, stop := context.WithCancel(ctx)
		defer stop()
		for i, node := range s.Nodes {
			if pid, err := s.NodeExec(ctx, node, "pidof", "-s", "ctrlmesh-manager"); err == nil {
				watching.Go(func() { peaks[i] = s.peakMemory(watched, node, strings.TrimSpace(pid)) })
			}
		}
		var served error
		watching.Go(func() { served = s.checkServices(watched, victim) })
		why, err := attack(ctx)
		stop()
		watching.Wait()
		return why, errors.Join(err, served)
	}
	why, err := s.withBystander(ctx, victim, attacked)
	if err != nil {
		return "", err
	}
	if peak := slices.Max(peaks); peak == 0 || peak > maxMeshMemory {
		return "", fmt.Errorf("a manager took %d MiB", peak>>20)
	}
	after, err := s.restartCounts(ctx)
	if err != nil {
		return "", err
	}
	if !slices.Equal(before, after) {
		return "", fmt.Errorf("pods of the mesh restarted: %v, then %v", before, after)
	}
	return fmt.Sprintf("%s; managers took %d MiB", why, slices.Max(peaks)>>20), nil
}

// restartCounts returns the containers of the mesh, sorted, each with its restart count.
func (s *suite) restartCounts(ctx context.Context) (counts []string, err error) {
	for _, name := range []string{kube.AgentName, kube.ManagerName} {
		pods, err := s.MeshPods(ctx, name)
		if err != nil {
			return nil, err
		}
		for _, p := range pods {
			for _, c := range p.Status.ContainerStatuses {
				counts = append(counts, fmt.Sprintf("%s/%s %d", p.Name, c.Name, c.RestartCount))
			}
		}
	}
	slices.Sort(counts)
	return counts, nil
}

// checkServices returns, when ctx has ended, an error if agents or managers did not serve
// others meanwhile.
func (s *suite) checkServices(ctx context.Context, victim *fleet.Member) error {
	const every, within = time.Second, 10 * time.Second
	attempt := func(what string, do func(context.Context) error) error {
		each, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
		defer cancel()
		return failure.Wrap(do(each), "%s under attack", what)
	}
	for ctx.Err() == nil {
		err := errors.Join(
			attempt("reading an agent's metrics", func(ctx context.Context) error { return s.connected(ctx, victim.Spec.NodeName) }),
			attempt("reading a manager's metrics", s.scrapeManagers),
			attempt("admitting a member", func(ctx context.Context) error {
				p := harness.NewPod(victim.Namespace, "dry-run", victim.Policy, victim.Mode, victim.Spec.NodeName, "true")
				return s.Create(ctx, p, client.DryRunAll)
			}),
		)
		if err != nil {
			return err
		}
		_ = kube.Sleep(ctx, every)
	}
	return nil
}

// connected returns an error unless the agent of a node is connected to a manager.
func (s *suite) connected(ctx context.Context, node string) error {
	n, err := s.Metric(ctx, node, "ctrlmesh_agent_manager_connected")
	if err == nil && n != 1 {
		err = errors.New("the agent has lost its manager")
	}
	return err
}

// scrapeManagers reads the metrics of all managers.
func (s *suite) scrapeManagers(ctx context.Context) error {
	managers, err := s.MeshPods(ctx, kube.ManagerName)
	if err != nil {
		return err
	}
	for _, m := range managers {
		if _, err := s.Clientset.CoreV1().Pods(m.Namespace).ProxyGet("http", m.Name, metricsPort, "/metrics", nil).DoRaw(ctx); err != nil {
			return fmt.Errorf("reading the metrics of %s: %w", m.Name, err)
		}
	}
	return nil
}

// reportsArrive checks that the manager learns of a new pod beside the victim.
func (s *suite) reportsArrive(ctx context.Context, victim *fleet.Member) error {
	home, err := s.CreatePodNamespace(ctx, "reported")
	if err != nil {
		return err
	}
	if _, err := s.fleet.CreateShard(ctx, home, "own", meshv1alpha1.FailClosed); err != nil {
		return err
	}
	if err := s.CreateAll(ctx, harness.NewPod(home, "own", "own", victim.Mode, victim.Spec.NodeName, "sleep", "1000000")); err != nil {
		return err
	}
	return s.Until(ctx, "a report about a new pod", func(ctx context.Context) error {
		modes, err := s.fleet.CapturedModes(ctx, home, "own")
		if err == nil && modes["own"] != victim.Mode {
			err = fmt.Errorf("the manager knows about it: %q", modes["own"])
		}
		return err
	})
}
