package ui

import (
	"context"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/cost"
)

const (
	// costsEvery is the least time between two readings of the metrics of all agents, which are large.
	costsEvery = 10 * time.Second
	// costsOver is the time that rates are of.
	costsOver = time.Minute
)

// meter has the last readings of agents' metrics, the oldest first. Pages share it.
type meter struct {
	lock     sync.Mutex
	readings []cost.Reading
}

// read reads the metrics if the last reading is old, and returns the costs since the oldest one that is not too old.
func (m *meter) read(ctx context.Context, s *Server) (cost.Costs, error) {
	m.lock.Lock()
	defer m.lock.Unlock()
	if n := len(m.readings); n == 0 || s.Reader.Now().Sub(m.readings[n-1].At) >= costsEvery {
		now, err := answer.ReadCosts(ctx, s.Reader, s.Namespace)
		if err != nil {
			return cost.Costs{}, err
		}
		m.readings = append(m.readings, now)
	}
	last := m.readings[len(m.readings)-1]
	for last.At.Sub(m.readings[0].At) > costsOver {
		m.readings = m.readings[1:]
	}
	return cost.Between(m.readings[0], last, s.Namespace), nil
}

// costsView is what the page of costs shows.
type costsView struct {
	cost.Costs
	// Measured means that the rates are known.
	Measured bool
}

func (s *Server) costs(ctx context.Context, _ parameters) (string, any, error) {
	is, err := s.meter.read(ctx, s)
	return "Costs", costsView{is, is.Seconds >= costsEvery.Seconds()}, err
}
