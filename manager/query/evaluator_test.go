package query

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

// server counts evaluations.
type server struct {
	mu    sync.Mutex
	calls map[Query]int
	take  map[Query]time.Duration // how long evaluations take; longer than they may for ever
	fail  bool
}

func (s *server) evaluate(ctx context.Context, q Query) (Answer, error) {
	s.mu.Lock()
	s.calls[q]++
	fail, take := s.fail, s.take[q]
	s.mu.Unlock()
	if fail {
		return Answer{Numbers: 1}, errors.New("refused")
	}
	select {
	case <-ctx.Done():
		return Answer{}, ctx.Err()
	case <-time.After(take):
		return Answer{Numbers: 1, Min: 1, Max: 1}, nil
	}
}

func (s *server) count(q Query) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[q]
}

// evaluating returns an Evaluator that runs.
func evaluating(t *testing.T) (*Evaluator, *server, *atomic.Int32) {
	s, changed := &server{calls: map[Query]int{}, take: map[Query]time.Duration{}}, &atomic.Int32{}
	e := &Evaluator{Evaluate: s.evaluate, Changed: func() { changed.Add(1) }, Log: slog.New(slog.DiscardHandler)}
	go func() { _ = e.Run(t.Context()) }()
	return e, s, changed
}

var (
	one = Query{Root: "r", Namespace: "ns", Expression: "one"}
	two = Query{Root: "r", Namespace: "ns", Expression: "two"}
)

func TestQueriesAreEvaluatedAgainAndAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, s, changed := evaluating(t)
		time.Sleep(time.Hour)
		require.Empty(t, e.Answers("r"))
		asked := time.Now()
		e.Set([]Query{one, two, one})
		synctest.Wait()
		require.Equal(t, map[Query]Answer{one: {At: asked, Numbers: 1, Min: 1, Max: 1}, two: {At: asked, Numbers: 1, Min: 1, Max: 1}}, e.Answers("r"))
		require.Empty(t, e.Answers("other"))
		require.EqualValues(t, 1, changed.Load(), "once for both")
		for range 10 {
			e.Set([]Query{one, two}) // which evaluates nothing at once
			time.Sleep(every)
			synctest.Wait()
		}
		require.Equal(t, 11, s.count(one))
		require.EqualValues(t, 11, changed.Load())
		require.Equal(t, asked.Add(10*every), e.Answers("r")[one].At)
	})
}

func TestQueriesThatNoRootAsksAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, s, _ := evaluating(t)
		e.Set([]Query{one, two})
		synctest.Wait()
		e.Set([]Query{two})
		require.NotContains(t, e.Answers("r"), one)
		require.Contains(t, e.Answers("r"), two)
		e.Set(nil)
		require.Empty(t, e.roots)
		time.Sleep(time.Hour)
		require.Equal(t, 1, s.count(one))
		e.Set([]Query{one})
		require.Empty(t, e.Answers("r"), "not the former answer")
	})
}

// The answer to a query that was forgotten meanwhile is dropped.
func TestAnswersToForgottenQueriesAreDropped(t *testing.T) {
	for name, next := range map[string][]Query{"query": {two}, "root": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e, s, _ := evaluating(t)
				s.take[one] = time.Second
				e.Set([]Query{one})
				synctest.Wait()
				e.Set(next)
				time.Sleep(time.Second / 2)
				again := time.Now()
				e.Set([]Query{one})
				time.Sleep(time.Second * 3 / 4)
				require.Empty(t, e.Answers("r"))
				time.Sleep(time.Second)
				require.False(t, e.Answers("r")[one].At.Before(again))
				require.Equal(t, 2, s.count(one))
			})
		})
	}
}

func TestFailedEvaluationReplacesTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, s, _ := evaluating(t)
		e.Set([]Query{one})
		synctest.Wait()
		s.mu.Lock()
		s.fail = true
		s.mu.Unlock()
		time.Sleep(every)
		synctest.Wait()
		require.Equal(t, Answer{At: time.Now(), Problem: "refused"}, e.Answers("r")[one])
	})
}

// A root with slow queries has one evaluated at a time, and each ends in time.
func TestSlowQueriesDelayNoOtherRoots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, s, _ := evaluating(t)
		var all []Query
		for i := range 8 {
			q := Query{Root: "slow", Expression: fmt.Sprint(i)}
			s.take[q] = time.Hour
			all = append(all, q)
		}
		e.Set(append(all, one))
		time.Sleep(time.Second)
		require.NotEmpty(t, e.Answers("r"))
		total := 0
		for _, q := range all {
			total += s.count(q)
		}
		require.Equal(t, 1, total)
		time.Sleep(8 * timeout)
		require.Len(t, e.Answers("slow"), 8)
		require.Equal(t, 6, s.count(one), "every 15 s")
	})
}

func TestRootsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, s, _ := evaluating(t)
		var all []Query
		for i := range 3 * evaluators {
			q := Query{Root: types.UID(fmt.Sprint(i)), Expression: "slow"}
			s.take[q] = time.Hour
			all = append(all, q)
		}
		e.Set(all)
		time.Sleep(3*timeout + time.Second)
		for _, q := range all {
			require.NotZero(t, s.count(q))
		}
	})
}
