package main

import (
	"context"
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// holding is what an agent holds.
type holding struct{ goroutines, sockets, bytes float64 }

// least of two readings, in each respect.
func (h holding) least(g holding) holding {
	return holding{min(h.goroutines, g.goroutines), min(h.sockets, g.sockets), min(h.bytes, g.bytes)}
}

// over is what h has more than the start.
func (h holding) over(start holding) holding {
	return holding{h.goroutines - start.goroutines, h.sockets - start.sockets, h.bytes - start.bytes}
}

// most of two, in each respect.
func (h holding) most(g holding) holding {
	return holding{max(h.goroutines, g.goroutines), max(h.sockets, g.sockets), max(h.bytes, g.bytes)}
}

// small says whether h is so little more that nothing leaks.
func (h holding) small() bool {
	return h.goroutines <= maxGoroutines && h.sockets <= maxSockets && h.bytes <= maxRSS
}

func (h holding) String() string {
	return fmt.Sprintf("%+.0f goroutines, %+.0f descriptors, %+.1f MB", h.goroutines, h.sockets, h.bytes/1e6)
}

const (
	readings  = 12 // of what varies from request to request; the least of them is what is held between
	readEvery = 250 * time.Millisecond
)

// holds is the least that each agent held in some readings.
func (w *world) holds(ctx context.Context) (map[string]holding, error) {
	out := map[string]holding{}
	for range readings {
		for _, node := range w.nodes {
			families, err := w.scrape(ctx, node)
			if err != nil {
				return nil, err
			}
			h := holding{
				total(families["go_goroutines"], nil), total(families["process_open_fds"], nil), total(families["process_resident_memory_bytes"], nil),
			}
			if h.goroutines == 0 || h.sockets == 0 || h.bytes == 0 {
				return nil, kube.Never(fmt.Errorf("the agent on %s does not say what it holds", node))
			}
			if before, ok := out[node]; ok {
				h = h.least(before)
			}
			out[node] = h
		}
		select {
		case <-time.After(readEvery):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return out, nil
}

// atRest waits until the agents let go of nothing more: kept connections end some time
// after their last request.
func (w *world) atRest(ctx context.Context) (start map[string]holding, err error) {
	err = w.until(ctx, "the agents to come to rest", func(ctx context.Context) error {
		before := start
		if start, err = w.holds(ctx); err != nil {
			return err
		}
		for node, h := range start {
			was, ok := before[node]
			if !ok {
				return fmt.Errorf("%s was read once", node)
			}
			if d := was.over(h); d.goroutines > 0 || d.sockets > 0 {
				return fmt.Errorf("on %s they fall: %v", node, d)
			}
		}
		return nil
	})
	for node, h := range start {
		w.say("  at the start %s holds %.0f goroutines, %.0f descriptors, %.1f MB", node, h.goroutines, h.sockets, h.bytes/1e6)
	}
	return start, err
}

// backTo waits until no agent holds more than at the start, and counts what any holds
// more if they do not come to that.
func (w *world) backTo(ctx context.Context, c *trafficCounts, start map[string]holding) error {
	begun := time.Now()
	var more holding
	var read bool
	err := w.until(ctx, "the agents to hold as much as at the start", func(ctx context.Context) error {
		now, err := w.holds(ctx)
		if err != nil {
			return err
		}
		first := true
		for node, h := range now {
			d := h.over(start[node])
			if first {
				more = d
			}
			more, first, read = more.most(d), false, true
		}
		if !more.small() {
			return fmt.Errorf("they hold more: %v", more)
		}
		return nil
	})
	if !read {
		return err
	}
	c.compared(more)
	w.say("  back at the start after %v: %v", time.Since(begun).Round(time.Second), more)
	return nil // it is counted
}
