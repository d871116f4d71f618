package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/node/lifecycle"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
)

// TakeOver takes the pods over from the agent that serves. If none does, it restores what the
// last one saved. It returns the socket on which the next agent asks. After an error the
// predecessor continues to serve.
func (n *Node) TakeOver(ctx context.Context, path string) (_ *takeover.Socket, err error) {
	socket, err := takeover.Listen(path, n.Logger)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = socket.Close()
		}
	}()
	start := time.Now()
	offer, err := takeover.Ask(ctx, path, n.PodStart)
	if errors.Is(err, takeover.ErrRefused) {
		return nil, err
	}
	n.logError(err, "no takeover: starting as after a crash", nil)
	n.earlier.Predecessor, n.earlier.Own = takeover.At(path), socket.ID()
	if offer == nil {
		// Take the socket first. If the predecessor only hangs, it must find that the socket
		// is taken before it changes the redirections of this agent.
		if err := socket.Take(); err != nil {
			return nil, err
		}
		n.presence.restore(n.destinations, nil, nil)
		return socket, nil
	}
	n.presence.restore(n.destinations, offer.Pods, offer.Drained)
	if err := n.verifyCaptured(offer.Pods); err != nil {
		offer.Close()
		return nil, fmt.Errorf("taking over: the agent before this one continues: %w", err)
	}
	// The predecessor gives its last sign of life now. After two seconds without any, connections go
	// direct, and this agent has much to do at first.
	n.signOfLife(false)
	traffic, err := offer.Serving()
	n.logError(err, "failed to notify the agent before this one, which will notice the takeover by the socket", nil)
	n.importCounts(traffic)
	n.Logger.Info("took over", "pods", len(offer.Pods), "duration", time.Since(start))
	return socket, socket.Take()
}

// verifyCaptured returns what is missing of what was offered.
func (n *Node) verifyCaptured(offered []takeover.Pod) error {
	if (n.destinations.cluster != nil || len(offered) > 0) && !n.destinations.redirected {
		return errors.New("the apiserver's addresses are not redirected")
	}
	missing := map[string]bool{}
	for _, p := range offered {
		if n.pods[p.UID].redirection.captured == nil {
			missing[p.UID] = true
		}
	}
	found, err := n.Locator.Find(missing)
	if err != nil {
		return err
	}
	for uid := range missing {
		if p := n.pods[uid]; len(found[uid].PIDs) > 0 { // else it waits for a process
			return fmt.Errorf("pod %s is not captured any more: %s", p.info, p.problem)
		}
	}
	return nil
}

// incumbent is the agent as its successor sees it.
type incumbent struct{ *Node }

// Incumbent returns the node as its successor sees it.
func (n *Node) Incumbent() takeover.Incumbent { return incumbent{n} }

// Offer implements takeover.Incumbent.
func (i incumbent) Offer(ctx context.Context) (offered []takeover.Pod, err error) {
	err = i.do(ctx, func() error {
		if i.phase != serving {
			return errors.New("this agent does not serve any more")
		}
		i.enter(handing)
		for uid, p := range i.pods {
			if p.redirection.captured != nil {
				offered = append(offered, i.offer(uid, p))
			}
		}
		return nil
	})
	if ctx.Err() != nil {
		offered = nil // the loop may still write it
	}
	return offered, err
}

// offer returns what a successor needs to serve a pod.
func (i incumbent) offer(uid string, p *pod) takeover.Pod {
	files, err := p.redirection.captured.Files()
	i.logError(err, "failed to offer the listeners of a pod: the successor captures it as after a crash", p)
	if files != nil && p.redirection.webhook.captured != nil {
		files.Inbound, err = p.redirection.webhook.captured.Files()
		i.logError(err, "failed to offer the listeners of a pod's webhook", p)
	}
	p.assignment.confirmed = i.version(p) // holds for what the successor does until it serves
	return takeover.Pod{
		UID: uid, Namespace: p.info.Namespace, Name: p.info.Name, Version: p.assignment.confirmed, Files: files,
		Traffic: i.exportCounts(p.redirection.proxied), Journaled: i.Journal.Outlives(),
	}
}

// Yield implements takeover.Incumbent.
func (i incumbent) Yield(ctx context.Context) (drained <-chan struct{}, err error) {
	return i.departure.drained, i.run(ctx, i.departure.yield)
}

// Traffic implements takeover.Incumbent.
func (i incumbent) Traffic(ctx context.Context) (traffic map[string][]byte) {
	_ = i.run(ctx, func() {
		traffic = map[string][]byte{}
		for uid, p := range i.departure.left {
			traffic[uid] = i.exportCounts(p)
		}
	})
	if ctx.Err() != nil {
		traffic = nil // the loop may still write it
	}
	return traffic
}

// Resume implements takeover.Incumbent.
func (i incumbent) Resume(ctx context.Context) error {
	return i.do(ctx, func() error {
		if i.phase != handing {
			return nil
		}
		i.enter(serving)
		i.podsChanged()
		i.earlier.AddSuccessor(i.policies())
		for uid, p := range i.pods {
			if p.assignment.unsaved != nil {
				p.assignment.successor = i.earlier.Over(uid)
			}
		}
		// Policies that arrived meanwhile are in force in this agent only.
		for uid, p := range i.pods {
			i.effects.handle(uid, p, lifecycle.Resumption)
		}
		return i.destinations.save()
	})
}

// Stop implements takeover.Incumbent.
func (i incumbent) Stop(ctx context.Context) error {
	return i.run(ctx, i.departure.stop)
}

// aloneWithin is how long a node may be without an agent after a takeover. The container
// of a successor that exits usually restarts sooner.
const aloneWithin = 5 * time.Second

// MayTakeOver implements takeover.Incumbent: of two agents, the one of the later pod stays.
func (i incumbent) MayTakeOver(podStart time.Duration) error {
	if podStart < i.PodStart {
		return errors.New("an agent whose pod started later serves")
	}
	return nil
}

// WatchSuccessor returns an error when the agent that took over has exited: after a restart,
// this one serves again. It returns nil when ctx ends, and does not return before that
// after the signal to stop.
func (n *Node) WatchSuccessor(ctx context.Context, path string) error {
	select {
	case <-n.departure.yielded:
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
		if err := n.run(ctx, func() { idle = n.phase == yielded && n.departure.draining == 0 }); err == nil && idle {
			return errors.New("the agent that took over has exited: restarting to serve again")
		}
	}
}
