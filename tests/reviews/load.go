package reviews

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Load creates objects, as a dry run, at a steady rate.
type Load struct {
	stop    context.CancelFunc
	stopped sync.WaitGroup

	mu       sync.Mutex
	outcomes []Outcome
}

const (
	// maxUnderWay bounds the creates that wait for an answer. Above that, the rate decreases.
	maxUnderWay = 64
	// oldEvery is of how many rounds over the namespaces one creates objects that must be
	// converted.
	oldEvery = 10
)

// Load begins to create so many objects per second, in one namespace after the other. The
// caller must Stop it.
func (s *Site) Load(ctx context.Context, perSecond int, namespaces ...string) *Load {
	l := &Load{}
	until, stop := context.WithCancel(ctx)
	l.stop = stop
	underWay := make(chan struct{}, maxUnderWay)
	l.stopped.Go(func() {
		kube.Every(until, time.Second/time.Duration(perSecond), func(_ context.Context, i int) {
			select {
			case underWay <- struct{}{}:
			default:
				return
			}
			l.stopped.Go(func() {
				defer func() { <-underWay }()
				version := v2Version
				if i/len(namespaces)%oldEvery == 0 {
					version = v1Version
				}
				// The last creates end by themselves, too.
				l.add(s.create(ctx, version, namespaces[i%len(namespaces)], nil, true))
			})
		})
	})
	return l
}

func (l *Load) add(o Outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outcomes = append(l.outcomes, o)
}

// Outcomes returns the creates that have ended so far.
func (l *Load) Outcomes() []Outcome {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.outcomes)
}

// Await waits until so many creates have ended that began since a time.
func (l *Load) Await(ctx context.Context, since time.Time, n int) error {
	return kube.UntilWithin(ctx, within, "more reviews", func(context.Context) error {
		ended := 0
		for _, o := range l.Outcomes() {
			if !o.Start.Before(since) {
				ended++
			}
		}
		if ended < n {
			return fmt.Errorf("%d creates of %d have ended", ended, n)
		}
		return nil
	})
}

// Stop ends the load, and returns all outcomes. It may be called again.
func (l *Load) Stop() []Outcome {
	l.stop()
	l.stopped.Wait()
	return l.Outcomes()
}
