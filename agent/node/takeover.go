package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
)

// TakeOver takes the pods over from the agent that serves, or from what one left.
// It returns the socket by which the next agent will. After an error the agent
// before this one goes on.
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
	if err != nil {
		n.Logger.Error("starting as after a crash", "reason", err)
	}
	n.lastSocket, n.socket = takeover.At(path), socket.ID()
	if offer == nil {
		// First the socket: an agent that only hangs must find it before it touches
		// what this one makes.
		if err := socket.Take(); err != nil {
			return nil, err
		}
		n.restore(nil, nil)
		return socket, nil
	}
	n.restore(offer.Pods, offer.Drained)
	if err := n.tookOver(offer.Pods); err != nil {
		offer.Close()
		return nil, fmt.Errorf("taking over: the agent before this one goes on: %w", err)
	}
	traffic, err := offer.Serving()
	if err != nil {
		n.Logger.Error("the agent before this one will find out by itself", "reason", err)
	}
	n.recount(traffic)
	n.Logger.Info("took over", "pods", len(offer.Pods), "duration", time.Since(start))
	return socket, socket.Take()
}

// tookOver says what is missing of what was offered.
func (n *Node) tookOver(offered []takeover.Pod) error {
	if (n.cluster != nil || len(offered) > 0) && !n.redirected {
		return errors.New("the apiserver's addresses are not redirected")
	}
	missing := map[string]bool{}
	for _, p := range offered {
		if n.members[p.UID].captured == nil {
			missing[p.UID] = true
		}
	}
	found, err := n.Locator.Find(missing)
	if err != nil {
		return err
	}
	for uid := range missing {
		if mb := n.members[uid]; len(found[uid].PIDs) > 0 { // else it waits for one
			return fmt.Errorf("pod %s was captured, and is not now: %s", mb.pod, mb.problem)
		}
	}
	return nil
}
