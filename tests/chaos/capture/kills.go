package capture

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// stopFor is how long an agent is stopped. It is longer than members that fail open may wait.
const stopFor = 3 * time.Second

// kills kills and stops agents on all nodes of the fleet at once, half of the time without a
// manager. Members under Closed must get nothing except from an agent. Those under Open that
// are captured by eBPF bypass the mesh, and return to it.
func (s *suite) kills(ctx context.Context) error {
	if err := s.startFleet(ctx); err != nil {
		return err
	}
	begun, err := s.Mark()
	if err != nil {
		return err
	}
	k := &killing{suite: s}
	rounds := wantKills / 2
	for i := range rounds {
		if i == rounds/2 {
			restore, err := s.WithoutManager(ctx)
			if restore != nil {
				defer func() { s.DoubtErr("kills", restore()) }()
			}
			if err != nil {
				return err
			}
			s.Logf("  without a manager from here on")
		}
		if err := k.round(ctx, i); err != nil {
			return fmt.Errorf("round %d: %w", i+1, err)
		}
		if (i+1)%5 == 0 {
			s.Logf("  %d killed or stopped; the slowest recovery took %v", s.counts.kills, stats.Percentile(s.counts.recoveries, 1).Round(time.Millisecond))
		}
	}
	if err := s.fleet.WaitServed(ctx, time.Now()); err != nil {
		return errors.Join(errors.New("afterwards members do not work"), err)
	}
	if k.notDirect == 0 && len(k.direct) > 0 {
		s.counts.openDirect = "ok"
	} else {
		s.counts.openDirect = fmt.Sprintf("%d-not", k.notDirect)
	}
	s.Logf("  members under Open went direct after %v at most", stats.Percentile(k.direct, 1).Round(time.Millisecond))
	return s.judgeClosed(ctx, begun, k.killed)
}

// judgeClosed counts what members under Closed got from outside their shard, and which of their
// requests bypassed the mesh.
func (s *suite) judgeClosed(ctx context.Context, begun kube.Mark, killed []time.Time) error {
	members := s.fleet.Under(fleet.Closed)
	unsharded, err := s.fleet.Count("unsharded", members, begun.At, time.Now(), func(m *fleet.Member, r fleet.Request) bool {
		return r.Direct() || r.Beyond(m.Owns)
	})
	s.counts.unsharded += unsharded
	if err != nil {
		return err
	}
	requests, leaked, err := s.fleet.LeaksOf(ctx, members, begun, killed)
	if err != nil {
		return err
	}
	s.counts.unsharded += len(leaked)
	s.Logf("  of %d requests of members under Closed %d bypassed the mesh", requests, len(leaked))
	return nil
}

// killing is the state of part kills.
type killing struct {
	*suite
	killed    []time.Time
	direct    []time.Duration // from an agent's exit to the first response without one
	notDirect int
}

// outage is what followed when one agent was killed or stopped.
type outage struct {
	recovery  time.Duration // from the agent's return until it has served each of its members
	killed    time.Time
	direct    []time.Duration
	notDirect []string
}

// round kills an agent on each node if i is even, and stops it if i is odd.
func (k *killing) round(ctx context.Context, i int) error {
	g, ctx := errgroup.WithContext(ctx)
	outages := make([]outage, 2)
	for n, node := range k.Nodes[:2] {
		g.Go(func() (err error) {
			outages[n], err = k.interrupt(ctx, node, i%2 == 0)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, o := range outages {
		k.counts.kills++
		k.counts.recoveries = append(k.counts.recoveries, o.recovery)
		if !o.killed.IsZero() {
			k.killed = append(k.killed, o.killed)
		}
		k.direct = append(k.direct, o.direct...)
		for _, why := range o.notDirect {
			k.notDirect++
			k.Doubt("kills: %s", why)
		}
	}
	return nil
}

// interrupt kills or stops the agent of a node.
func (k *killing) interrupt(ctx context.Context, node string, kill bool) (o outage, err error) {
	pid, err := k.AgentPID(ctx, node)
	if err != nil {
		return o, err
	}
	var from, back time.Time
	if kill {
		from, back, err = k.kill(ctx, node, pid)
		o.killed = from
	} else {
		from, back, err = k.stop(ctx, node, pid)
	}
	if err != nil {
		return o, err
	}
	if o.recovery, err = k.recovered(ctx, node, back); err != nil {
		return o, err
	}
	away := stopFor
	if kill {
		away = back.Sub(from)
	}
	k.wentDirect(node, from, away, &o)
	return o, nil
}

// kill kills an agent as the OOM killer does, and waits until another runs.
func (k *killing) kill(ctx context.Context, node, pid string) (from, back time.Time, err error) {
	if from, err = k.Signal(ctx, node, pid, "KILL"); err != nil {
		return from, back, err
	}
	back, err = k.WaitAgentRestart(ctx, node, pid)
	return from, back, err
}

// stop stops an agent with SIGSTOP for a while.
func (k *killing) stop(ctx context.Context, node, pid string) (from, back time.Time, err error) {
	if from, err = k.Signal(ctx, node, pid, "STOP"); err != nil {
		return from, back, err
	}
	_ = kube.Sleep(ctx, stopFor) // the duration is part of the test
	back, err = k.Signal(context.WithoutCancel(ctx), node, pid, "CONT")
	return from, back, err
}

// recovered waits until the agent that returned at a time has served all members of its node.
// It returns how long the first response to the last of them took since then.
func (k *killing) recovered(ctx context.Context, node string, back time.Time) (time.Duration, error) {
	var slowest time.Duration
	for _, m := range k.fleet.On(node) {
		b, err := m.WaitRequest(ctx, "an answer after the agent's return", back, fleet.Request.ViaMesh)
		if err != nil {
			return 0, err
		}
		slowest = max(slowest, b.End().Sub(back))
		// On new connections and on reused ones.
		for _, kind := range []string{fleet.FreshKind, "http2"} {
			if _, err := m.WaitRequest(ctx, "an answer to "+kind, back, func(b fleet.Request) bool { return b.Kind == kind && b.ViaMesh() }); err != nil {
				return 0, err
			}
		}
	}
	return slowest, nil
}

// wentDirect checks whether the members of a node that fail open bypassed the mesh in time
// while their agent was unavailable. Only eBPF capture can detect that.
func (k *killing) wentDirect(node string, from time.Time, away time.Duration, o *outage) {
	for _, m := range k.fleet.On(node) {
		if m.Policy != fleet.Open || m.Mode != "ebpf" {
			continue
		}
		all, err := m.Requests()
		if err != nil {
			o.notDirect = append(o.notDirect, err.Error())
			continue
		}
		b, ok := fleet.First(all, from, func(b fleet.Request) bool { return b.Kind == fleet.FreshKind && b.OK() && b.Direct() })
		switch took := b.Start.Sub(from); { // until it connected: the response takes longer
		case ok && took <= maxDirect:
			o.direct = append(o.direct, took)
		case away > maxDirect:
			o.notDirect = append(o.notDirect, fmt.Sprintf("%s did not go direct within %v of %s: %s", m.Name, maxDirect, from.Format("15:04:05.000"), b))
		}
	}
}
