// Package query evaluates PromQL queries, by whose results rollouts are analyzed.
package query

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/wake"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

const (
	// every is the time between the beginnings of two evaluations of a query.
	every = 15 * time.Second
	// timeout bounds the time of an evaluation.
	timeout = 10 * time.Second
	// evaluators bounds how many queries are evaluated at once. Each is of another root.
	evaluators = 8
)

// Query is what a root asks.
type Query struct {
	Root types.UID
	// Namespace of the root.
	Namespace string
	// Expression in PromQL, without variables.
	Expression string
}

// Answer is what the last evaluation of a query found.
type Answer struct {
	// At is when the evaluation began; zero if there has been none.
	At time.Time
	// Numbers counts the numbers in the result. Min and Max are the least and the greatest of them.
	Numbers  int
	Min, Max float64
	// Problem is why the result is not known, or is not all numbers, and what to do; empty if it is.
	// It is bounded, and has no secrets.
	Problem string
}

// Evaluator evaluates the queries of roots again and again. Roots take turns, so that slow queries
// of one root do not delay those of others.
type Evaluator struct {
	// Evaluate evaluates a query. The Evaluator sets the time of the answer, and its problem from the
	// error.
	Evaluate func(context.Context, Query) (Answer, error)
	// Changed is called after all due queries of a root were evaluated.
	Changed func()
	Log     *slog.Logger

	mu    sync.Mutex
	roots map[types.UID]*root
	poke  wake.Flag
}

// root is what one root asks.
type root struct {
	turn    time.Time // when an evaluation began last
	busy    bool      // a query is being evaluated
	queries map[Query]*evaluation
}

// evaluation is of one query.
type evaluation struct {
	query  Query
	answer Answer
	failed bool // the last evaluation returned an error
	due    time.Time
}

// Set sets the queries to evaluate. New ones are due at once; others are forgotten with their answers.
func (e *Evaluator) Set(queries []Query) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now, fresh := time.Now(), false
	next := map[types.UID]map[Query]*evaluation{}
	for _, q := range queries {
		if next[q.Root] == nil {
			next[q.Root] = map[Query]*evaluation{}
		}
		one := e.find(q)
		if one == nil {
			one, fresh = &evaluation{query: q, due: now}, true
		}
		next[q.Root][q] = one
	}
	roots := make(map[types.UID]*root, len(next))
	for uid, queries := range next {
		r := e.roots[uid]
		if r == nil {
			r = &root{}
		}
		r.queries, roots[uid] = queries, r
	}
	for uid, r := range e.roots {
		if roots[uid] == nil {
			r.queries = nil // an evaluation may still refer to it
		}
	}
	e.roots = roots
	if fresh {
		e.poke.Set()
	}
}

// find returns the evaluation of a query; nil if nobody has asked for it.
func (e *Evaluator) find(q Query) *evaluation {
	if r := e.roots[q.Root]; r != nil {
		return r.queries[q]
	}
	return nil
}

// Answers returns the answers to the queries of a root that have been evaluated.
func (e *Evaluator) Answers(uid types.UID) map[Query]Answer {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[Query]Answer{}
	if r := e.roots[uid]; r != nil {
		for q, one := range r.queries {
			if !one.answer.At.IsZero() {
				out[q] = one.answer
			}
		}
	}
	return out
}

// Run evaluates until the context ends.
func (e *Evaluator) Run(ctx context.Context) error {
	var g errgroup.Group
	g.SetLimit(evaluators)
	defer func() { _ = g.Wait() }() // they return no errors
	for ctx.Err() == nil {
		r, one, wait := e.next(time.Now())
		if r == nil {
			e.poke.Sleep(ctx, wait)
			continue
		}
		g.Go(func() error {
			e.evaluate(ctx, r, one)
			return nil
		})
	}
	return nil
}

// next returns what to evaluate now, and marks its root as busy; or how long it is until something is
// due.
func (e *Evaluator) next(now time.Time) (chosen *root, one *evaluation, wait time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	wait = every
	for _, r := range e.roots {
		first := r.urgent()
		switch {
		case r.busy || first == nil:
		case first.due.After(now):
			wait = min(wait, first.due.Sub(now))
		case chosen == nil || r.turn.Before(chosen.turn):
			chosen, one = r, first
		}
	}
	if chosen != nil {
		chosen.turn, chosen.busy = now, true
	}
	return chosen, one, wait
}

// urgent returns what is due first; nil if there is nothing.
func (r *root) urgent() (first *evaluation) {
	for _, one := range r.queries {
		if first == nil || one.due.Before(first.due) {
			first = one
		}
	}
	return first
}

// evaluate evaluates a query of a root.
func (e *Evaluator) evaluate(ctx context.Context, r *root, one *evaluation) {
	began := time.Now()
	bounded, cancel := context.WithTimeout(ctx, timeout)
	answer, err := e.Evaluate(bounded, one.query)
	cancel()
	if ctx.Err() != nil {
		return
	}
	answer.At = began
	result := "answered"
	if err != nil {
		answer, result = Answer{At: began, Problem: err.Error()}, "failed"
	}
	metrics.RolloutQueries.WithLabelValues(result).Inc()
	report, done := e.record(r, one, answer, err != nil)
	if report {
		e.Log.Warn("evaluating a query failed and will be tried again", "namespace", one.query.Namespace, "error", err)
	}
	if done {
		e.Changed()
	}
}

// record records an answer. It reports whether the query fails since then, and whether no further
// query of the root is due.
func (e *Evaluator) record(r *root, one *evaluation, answer Answer, failed bool) (fails, done bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.poke.Set()
	r.busy = false
	if r.queries[one.query] != one { // it was forgotten meanwhile
		return false, false
	}
	fails = failed && !one.failed
	one.answer, one.failed, one.due = answer, failed, answer.At.Add(every)
	now := time.Now()
	return fails, !collect.Any(r.queries, func(_ Query, other *evaluation) bool { return !other.due.After(now) })
}
