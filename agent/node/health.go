package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/internal/ticks"
)

// stalledAfter is how long without a check the agent counts as not ready.
const stalledAfter = 2 * time.Second

// losses are the redirections that have no effect. It is safe for concurrent use.
type losses struct {
	mu   sync.Mutex
	lost map[lossKey]capture.Loss // not repaired
	last time.Time                // a check ended
}

type lossKey struct {
	uid  string
	mode capture.Mode
}

// ready returns why the redirections of this node are not in force.
func (l *losses) ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last.IsZero() || time.Since(l.last) > stalledAfter {
		return errors.New("the redirections of this node are not checked")
	}
	for key, loss := range l.lost {
		if key.uid == "" {
			return fmt.Errorf("the redirection of this node (%s) has no effect: %w", key.mode, loss.Reason)
		}
	}
	return nil
}

// note keeps what a check found. It returns the new losses, and those that are repaired.
func (l *losses) note(found []capture.Loss) (fresh, repaired []capture.Loss) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = time.Now()
	before := l.lost
	l.lost = map[lossKey]capture.Loss{}
	for _, loss := range found {
		key := lossKey{loss.UID, loss.Mode}
		_, known := before[key]
		delete(before, key)
		if !known {
			fresh = append(fresh, loss)
		}
		if loss.Repair != nil {
			l.lost[key] = loss
		} else {
			repaired = append(repaired, loss)
		}
	}
	return fresh, slices.AppendSeq(repaired, maps.Values(before)) // lost before and not now
}

// WatchHealth checks the redirections until ctx ends, as long as this agent owns them. It
// owns them also while a successor is offered them: without checks, the connections of pods
// that fail open go direct.
func (n *Node) WatchHealth(ctx context.Context, socket *takeover.Socket) {
	if n.Inbound != nil {
		var inbound sync.WaitGroup
		defer inbound.Wait()
		inbound.Go(func() { n.watchInbound(ctx, socket) })
	}
	ticks.Every(ctx, n.Capture.CheckInterval, func() {
		if phase(n.shown.Load()) > handing {
			return
		}
		if !socket.Current() {
			// This process was suspended, and another took its place. Repairs would take
			// the pods away from that one.
			n.Logger.Warn("another agent has taken over without a request")
			_, _ = n.Incumbent().Yield(ctx)
			return
		}
		n.check(ctx)
	})
}

// watchInbound steers the ports at which webhooks listen, and no others, while this agent owns
// the pods. The sign of life does not wait for it.
func (n *Node) watchInbound(ctx context.Context, socket *takeover.Socket) {
	ticks.Every(ctx, n.Inbound.CheckInterval, func() {
		if phase(n.shown.Load()) > handing || !socket.Current() {
			return
		}
		if err := n.Inbound.Check(); err != nil {
			n.Logger.Error("failed to check the connections to webhooks", "error", err)
		}
	})
}

// signOfLife checks the redirections, and gives a sign of life.
func (n *Node) signOfLife(repair bool) []capture.Loss {
	found := n.Capture.Check(repair)
	if n.Inbound != nil && !slices.Contains(n.Capture.Modes(), capture.EBPF) { // its checks give the sign of life
		n.Inbound.Beat()
	}
	return found
}

func (n *Node) check(ctx context.Context) {
	found := n.signOfLife(phase(n.shown.Load()) == serving)
	if ctx.Err() != nil || phase(n.shown.Load()) != serving {
		return // the agent is about to exit: a probe that did not arrive is no loss
	}
	fresh, repaired := n.losses.note(found)
	for _, loss := range fresh {
		n.Metrics.Lost(loss.Mode)
	}
	for _, loss := range repaired {
		n.Metrics.Repaired(loss.Mode)
	}
	if len(fresh)+len(repaired) > 0 {
		// The loop knows the pods' names. It is not waited for, because pods that fail
		// open go direct without the next check.
		go func() {
			_ = n.run(ctx, func() {
				for _, loss := range fresh {
					n.recordLoss("RedirectionLost", "the redirection to the mesh had no effect", loss)
				}
				for _, loss := range repaired {
					n.recordLoss("RedirectionRepaired", "the redirection to the mesh is in force again", loss)
				}
			})
		}()
	}
}

// recordLoss logs a loss, or its repair, and records an Event.
func (n *Node) recordLoss(reason, what string, loss capture.Loss) {
	note := fmt.Sprintf("%s (%s): %v", what, loss.Mode, loss.Reason)
	p := n.pods[loss.UID]
	if p == nil {
		n.Logger.Warn(what, "mode", string(loss.Mode), "reason", loss.Reason, "uid", loss.UID)
		n.Events.Node(reason, note)
		return
	}
	n.Logger.Warn(what, "pod", p.info.String(), "mode", string(loss.Mode), "reason", loss.Reason)
	n.Events.Pod(p.info, reason, note)
}
