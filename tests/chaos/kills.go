package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
)

// hold is how long an agent is stopped: longer than members that fail open may wait.
const hold = 3 * time.Second

// kills ends and stops agents under the fleet, on all its nodes at once, half of
// the time without a manager. Nobody under Closed may get anything but from an
// agent; under Open, captured by eBPF, they go direct and come back.
func kills(ctx context.Context, w *world, r *result) (err error) {
	members, err := w.fleet(ctx, r)
	if err != nil {
		return err
	}
	begun, err := w.mark()
	if err != nil {
		return err
	}
	k := &killing{world: w, members: members}
	rounds := wantKills / 2
	for i := range rounds {
		if i == rounds/2 {
			restore, err := w.withoutManager(ctx)
			if restore != nil {
				defer func() { r.doubtErr("kills", restore()) }()
			}
			if err != nil {
				return err
			}
			w.say("  without a manager from here on")
		}
		strike := k.kill
		if i%2 == 1 {
			strike = k.stop
		}
		g, ctx := errgroup.WithContext(ctx)
		results := make([]strokeResult, 2)
		for n, node := range w.nodes[:2] {
			g.Go(func() (err error) {
				results[n], err = strike(ctx, node)
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return fmt.Errorf("round %d: %w", i+1, err)
		}
		for _, s := range results {
			r.kills++
			r.recoveries = append(r.recoveries, s.recovery)
			if !s.killed.IsZero() {
				k.killed = append(k.killed, s.killed)
			}
			k.direct = append(k.direct, s.direct...)
			for _, why := range s.notDirect {
				k.notDirect++
				r.doubt("kills: %s", why)
			}
		}
		if (i+1)%5 == 0 {
			w.say("  %d killed or stopped; the slowest recovery took %v", r.kills, percentile(r.recoveries, 1).Round(time.Millisecond))
		}
	}
	if err := w.fleetWorks(ctx, time.Now()); err != nil {
		return errors.Join(errors.New("afterwards members do not work"), err)
	}
	if k.notDirect == 0 && len(k.direct) > 0 {
		r.openDirect = "ok"
	} else {
		r.openDirect = fmt.Sprintf("%d-not", k.notDirect)
	}
	w.say("  members under Open went direct after %v at most", percentile(k.direct, 1).Round(time.Millisecond))
	return w.judgeClosed(ctx, r, begun, k.killed)
}

// judgeClosed counts what members under Closed got that was not their shard's, and
// what of theirs went around the mesh.
func (w *world) judgeClosed(ctx context.Context, r *result, begun mark, killed []time.Time) error {
	members := of(w.members, closed)
	for _, m := range members {
		all, err := m.asked()
		if err != nil {
			return err
		}
		n, example := count(stretch(all, begun.at, time.Now()), func(b beat) bool { return b.direct() || b.wide(m.owns) })
		if n > 0 {
			w.say("  ! unsharded: %s: %s", m.Name, example)
		}
		r.unsharded += n
	}
	requests, err := w.requests(begun, ids(members)...)
	if err != nil {
		return err
	}
	leaked, err := w.leaks(ctx, requests, killed)
	if err != nil {
		return err
	}
	r.unsharded += len(leaked)
	w.say("  of %d requests of members under Closed %d went around the mesh", len(requests), len(leaked))
	return nil
}

// killing is what kills know.
type killing struct {
	*world
	members   []*member
	killed    []time.Time
	direct    []time.Duration // from an agent's end to the first answer without one
	notDirect int
}

// strokeResult is what one agent's end led to.
type strokeResult struct {
	recovery  time.Duration // from the agent's return until each of its members was answered by it
	killed    time.Time
	direct    []time.Duration
	notDirect []string
}

// on are the members on a node.
func (k *killing) on(node string) (out []*member) {
	for _, m := range k.members {
		if m.Spec.NodeName == node {
			out = append(out, m)
		}
	}
	return out
}

// kill ends an agent as the kernel would that is out of memory.
func (k *killing) kill(ctx context.Context, node string) (s strokeResult, err error) {
	pid, err := k.agentPID(ctx, node)
	if err != nil {
		return s, err
	}
	if s.killed, err = k.signal(ctx, node, pid, "KILL"); err != nil {
		return s, err
	}
	back, err := k.agentReturned(ctx, node, pid)
	if err != nil {
		return s, err
	}
	if s.recovery, err = k.recovered(ctx, node, back); err != nil {
		return s, err
	}
	k.wentDirect(node, s.killed, back.Sub(s.killed), &s)
	return s, nil
}

// stop hangs an agent for a while.
func (k *killing) stop(ctx context.Context, node string) (s strokeResult, err error) {
	pid, err := k.agentPID(ctx, node)
	if err != nil {
		return s, err
	}
	stopped, err := k.signal(ctx, node, pid, "STOP")
	if err != nil {
		return s, err
	}
	select {
	case <-time.After(hold): // the time that it is hung for is the test
	case <-ctx.Done():
	}
	back, err := k.signal(context.WithoutCancel(ctx), node, pid, "CONT")
	if err != nil {
		return s, err
	}
	if s.recovery, err = k.recovered(ctx, node, back); err != nil {
		return s, err
	}
	k.wentDirect(node, stopped, hold, &s)
	return s, nil
}

// recovered waits until all members of a node were answered by the agent that is
// back since a time, and says how long after that the first good answer of the last
// of them came.
func (k *killing) recovered(ctx context.Context, node string, back time.Time) (time.Duration, error) {
	var slowest time.Duration
	for _, m := range k.on(node) {
		b, err := m.await(ctx, "an answer after the agent's return", back, beat.meshed)
		if err != nil {
			return 0, err
		}
		slowest = max(slowest, b.end().Sub(back))
		// On new connections, and on those that are kept.
		for _, kind := range []string{freshKind, "http2"} {
			if _, err := m.await(ctx, "an answer to "+kind, back, func(b beat) bool { return b.Kind == kind && b.meshed() }); err != nil {
				return 0, err
			}
		}
	}
	return slowest, nil
}

// wentDirect looks whether the members of a node that fail open were answered in
// time while their agent was away. Only the hook can tell that it is.
func (k *killing) wentDirect(node string, from time.Time, away time.Duration, s *strokeResult) {
	for _, m := range k.on(node) {
		if m.policy != open || m.way != "ebpf" {
			continue
		}
		all, err := m.asked()
		if err != nil {
			s.notDirect = append(s.notDirect, err.Error())
			continue
		}
		b, ok := first(all, from, func(b beat) bool { return b.Kind == freshKind && b.good() && b.direct() })
		switch took := b.Start.Sub(from); { // when it connected, for the answer takes its time
		case ok && took <= maxDirect:
			s.direct = append(s.direct, took)
		case away > maxDirect:
			s.notDirect = append(s.notDirect, fmt.Sprintf("%s did not go direct within %v of %s: %s", m.Name, maxDirect, from.Format("15:04:05.000"), b))
		}
	}
}
