package node

import (
	"context"
	"errors"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
)

// aloneWithin is how long a node may be without an agent after a takeover: the container
// of a successor that exits usually restarts sooner.
const aloneWithin = 5 * time.Second

// Admit implements takeover.Incumbent: of two agents, the one of the later pod stays.
func (h holder) Admit(podStart time.Duration) error {
	if podStart < h.PodStart {
		return errors.New("an agent whose pod started later serves: this one is to end")
	}
	return nil
}

// WatchSuccessor returns an error when the agent that took over is gone: once restarted,
// this one serves again. It returns nil when ctx ends, and does not return before that in
// an agent that was told to stop.
func (n *Node) WatchSuccessor(ctx context.Context, path string) error {
	select {
	case <-n.yielded:
	case <-ctx.Done():
		return nil
	}
	ticker := time.NewTicker(takeover.ProbeInterval)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		if there, _ := takeover.Probe(ctx, path, n.PodStart); there {
			last = time.Now()
		}
		if time.Since(last) < aloneWithin {
			continue
		}
		idle := false
		if err := n.do(ctx, func() error { idle = n.phase == yielded && n.draining == 0; return nil }); err == nil && idle {
			return errors.New("the agent that took over is gone: starting anew, to serve again")
		}
	}
}
