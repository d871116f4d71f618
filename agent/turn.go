package agent

import (
	"errors"
	"time"
)

// loopStalledAfter is how long the loop may take for one turn. Idle, it takes one
// each lookInterval.
const loopStalledAfter = 3 * time.Second

// turn is what the loop last left behind.
type turn struct {
	ended   time.Time
	phase   phase
	missing error // what pods wait for that only the loop knows
}

// noteTurn is called by the loop after each turn.
func (m *mesh) noteTurn() {
	t := &turn{ended: time.Now(), phase: m.phase}
	switch {
	case m.cluster == nil:
		t.missing = errors.New("waiting for the manager to name the apiserver's addresses")
	case !m.redirected:
		t.missing = errors.New("the apiserver's addresses are not redirected yet")
	}
	m.turn.Store(t)
}

// lastTurn returns an error if the loop has stalled.
func (m *mesh) lastTurn() (*turn, error) {
	t := m.turn.Load()
	switch {
	case t == nil:
		return nil, errors.New("the agent's loop has not started")
	case time.Since(t.ended) > loopStalledAfter:
		return nil, errors.New("the agent's loop is stuck")
	}
	return t, nil
}

// healthy returns an error if the loop has stalled. It does not enter the loop.
func (m *mesh) healthy() error {
	_, err := m.lastTurn()
	return err
}

// ready returns what is missing before pods can be served. It does not enter the loop.
func (m *mesh) ready() error {
	t, err := m.lastTurn()
	switch {
	case err != nil:
		return err
	case t.phase == stopped:
		return errors.New("told to stop")
	case t.phase >= yielded:
		return errors.New("handed over to another agent")
	case t.missing != nil:
		return t.missing
	case !m.watcher.Synced():
		return errors.New("waiting for the list of this node's pods")
	case t.phase == handing:
		return nil
	}
	return m.health.ready()
}
