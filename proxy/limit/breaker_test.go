package limit

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// model is a breaker without a window that slides: it is longer than any run.
type model struct {
	state         meshv1.BreakerState
	since, probed time.Duration
	probe         int // that is under way; 0: none
	ended, failed int
}

const (
	modelSleep = 10 * time.Second
	modelLeast = 4
)

func (m *model) ask(now time.Duration, request int) bool {
	switch {
	case m.state == closed:
		return true
	case m.state == opened && now-m.since < modelSleep, m.probe != 0 && now-m.probed < modelSleep:
		return false
	}
	if m.state == opened {
		m.to(halfOpen, now)
	}
	m.probe, m.probed = request, now
	return true
}

func (m *model) end(now, started time.Duration, request int, o Outcome) {
	switch {
	case m.state == halfOpen && m.probe == request:
		switch {
		case o.Unknown:
			m.probe = 0
		case o.Failed:
			m.to(opened, now)
		default:
			m.to(closed, now)
		}
	case m.state == closed && !o.Unknown && started >= m.since:
		m.ended++
		if o.Failed {
			m.failed++
		}
		if m.ended >= modelLeast && 2*m.failed >= m.ended {
			m.to(opened, now)
		}
	}
}

func (m *model) to(s meshv1.BreakerState, now time.Duration) { *m = model{state: s, since: now} }

func TestBreakerEqualsItsModel(t *testing.T) {
	seen := map[[2]meshv1.BreakerState]int{}
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 4))
		p := newPod(t, &meshv1.LimitRule{
			Trip:     &meshv1.Trip{WindowNs: int64(1000 * time.Hour), MinRequests: modelLeast, ErrorPercent: 50},
			Recovery: &meshv1.Recovery{SleepingWindowNs: int64(modelSleep)},
		})
		type request struct {
			ticket  Ticket
			started time.Duration
			probe   bool
		}
		var m model
		open, now := map[int]request{}, time.Duration(0)
		for i := 1; i < 300; i++ {
			now += time.Duration(1 + random.Int64N(int64(3*time.Second)))
			before := m.state
			if random.IntN(2) == 0 {
				ticket, refusal := p.ask(start.Add(now))
				passed := m.ask(now, i)
				require.Equal(t, passed, refusal == nil, "seed %d, step %d", seed, i)
				if passed {
					open[i] = request{ticket, now, m.probe == i}
				}
			}
			for n, r := range open { // any one of them
				o := Outcome{Failed: random.IntN(2) == 0, Unknown: random.IntN(8) == 0}
				r.ticket.Done(start.Add(now), o)
				if !r.probe || m.probe == n {
					m.end(now, r.started, n, o)
				}
				delete(open, n)
				break
			}
			require.Equal(t, m.state, p.States()[0].GetState(), "seed %d, step %d", seed, i)
			seen[[2]meshv1.BreakerState{before, m.state}]++
		}
	}
	for _, way := range [][2]meshv1.BreakerState{{closed, opened}, {opened, halfOpen}, {halfOpen, opened}, {halfOpen, closed}} {
		require.Positive(t, seen[way], way)
	}
}
