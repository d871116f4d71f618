package capture

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
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
		select {
		case <-ctx.Done():
		case <-time.After(250 * time.Millisecond):
		}
	}
	return peak
}
