package node

import (
	"errors"
	"time"
)

// loopStalledAfter is how long the loop may take for one turn. Idle, it takes one
// each checkInterval.
const loopStalledAfter = 3 * time.Second

// turn is the state of the loop after its last turn.
type turn struct {
	ended   time.Time
	phase   phase
	missing error // why pods wait, as far as only the loop knows
}

// noteTurn is called by the loop after each turn.
func (n *Node) noteTurn() {
	t := &turn{ended: time.Now(), phase: n.phase}
	switch {
	case n.destinations.cluster == nil:
		t.missing = errors.New("waiting for the manager to name the apiserver's addresses")
	case !n.destinations.redirected:
		t.missing = errors.New("the apiserver's addresses are not redirected yet")
	}
	n.turn.Store(t)
}

// lastTurn returns an error if the loop has stalled.
func (n *Node) lastTurn() (*turn, error) {
	t := n.turn.Load()
	switch {
	case t == nil:
		return nil, errors.New("the agent's loop has not started")
	case time.Since(t.ended) > loopStalledAfter:
		return nil, errors.New("the agent's loop has stalled")
	}
	return t, nil
}

// Healthy returns an error if the loop has stalled. It does not enter the loop.
func (n *Node) Healthy() error {
	_, err := n.lastTurn()
	return err
}

// Ready returns what is missing before pods can be served. It does not enter the loop.
func (n *Node) Ready() error {
	t, err := n.lastTurn()
	switch {
	case err != nil:
		return err
	case t.phase == stopped:
		return errors.New("this agent has stopped")
	case t.phase >= yielded:
		return errors.New("another agent has taken over")
	case t.missing != nil:
		return t.missing
	case !n.presence.watcher.Synced():
		return errors.New("waiting for the list of this node's pods")
	case t.phase == handing:
		return nil
	}
	return n.losses.ready()
}
