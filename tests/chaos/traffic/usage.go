package traffic

import (
	"context"
	"fmt"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// usage is what an agent uses.
type usage struct{ goroutines, sockets, bytes float64 }

// lowest returns the lower of two readings in each respect.
func (u usage) lowest(v usage) usage {
	return usage{min(u.goroutines, v.goroutines), min(u.sockets, v.sockets), min(u.bytes, v.bytes)}
}

// minus returns how much u exceeds start.
func (u usage) minus(start usage) usage {
	return usage{u.goroutines - start.goroutines, u.sockets - start.sockets, u.bytes - start.bytes}
}

// highest returns the higher of two readings in each respect.
func (u usage) highest(v usage) usage {
	return usage{max(u.goroutines, v.goroutines), max(u.sockets, v.sockets), max(u.bytes, v.bytes)}
}

// withinBounds reports whether a difference is small enough to be no leak.
func (u usage) withinBounds() bool {
	return u.goroutines <= maxGoroutines && u.sockets <= maxSockets && u.bytes <= maxRSS
}

func (u usage) String() string {
	return fmt.Sprintf("%+.0f goroutines, %+.0f descriptors, %+.1f MB", u.goroutines, u.sockets, u.bytes/1e6)
}

const (
	readings  = 12 // of what varies with requests in flight; the lowest is the usage at rest
	readEvery = 250 * time.Millisecond
)

// usages returns the lowest of some readings of each agent.
func (s *suite) usages(ctx context.Context) (map[string]usage, error) {
	out := map[string]usage{}
	for range readings {
		for _, node := range s.Nodes {
			families, err := s.Scrape(ctx, node)
			if err != nil {
				return nil, err
			}
			u := usage{
				kube.Total(families["go_goroutines"], nil), kube.Total(families["process_open_fds"], nil), kube.Total(families["process_resident_memory_bytes"], nil),
			}
			if u.goroutines == 0 || u.sockets == 0 || u.bytes == 0 {
				return nil, kube.Never(fmt.Errorf("the agent on %s does not say what it holds", node))
			}
			if before, ok := out[node]; ok {
				u = u.lowest(before)
			}
			out[node] = u
		}
		if err := kube.Sleep(ctx, readEvery); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// waitAtRest waits until the usage of the agents no longer falls, and returns it: idle
// connections are closed some time after their last request.
func (s *suite) waitAtRest(ctx context.Context) (start map[string]usage, err error) {
	err = s.Until(ctx, "the usage of the agents to stop falling", func(ctx context.Context) error {
		before := start
		if start, err = s.usages(ctx); err != nil {
			return err
		}
		for node, u := range start {
			was, ok := before[node]
			if !ok {
				return fmt.Errorf("%s was read once", node)
			}
			if d := was.minus(u); d.goroutines > 0 || d.sockets > 0 {
				return fmt.Errorf("on %s they fall: %v", node, d)
			}
		}
		return nil
	})
	for node, u := range start {
		s.Logf("  at the start %s holds %.0f goroutines, %.0f descriptors, %.1f MB", node, u.goroutines, u.sockets, u.bytes/1e6)
	}
	return start, err
}

// checkUsage waits until no agent uses more than at the start, within bounds, and counts the
// difference.
func (s *suite) checkUsage(ctx context.Context, start map[string]usage) error {
	begun := time.Now()
	var more usage
	var read bool
	err := s.Until(ctx, "the usage of the agents to be as at the start", func(ctx context.Context) error {
		now, err := s.usages(ctx)
		if err != nil {
			return err
		}
		first := true
		for node, u := range now {
			d := u.minus(start[node])
			if first {
				more = d
			}
			more, first, read = more.highest(d), false, true
		}
		if !more.withinBounds() {
			return fmt.Errorf("it is higher: %v", more)
		}
		return nil
	})
	if !read {
		return err
	}
	s.counts.addComparison(more)
	s.Logf("  back at the start after %v: %v", time.Since(begun).Round(time.Second), more)
	return nil // counted
}
