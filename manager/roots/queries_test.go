package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
)

// querying rolls out a revision whose analysis has a query, until the canary soaks under it.
func querying(t *testing.T) *rolling {
	r := newRolling(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout = &v1alpha1.Rollout{Soak: "1s", Analysis: &v1alpha1.RolloutAnalysis{
			Queries: []v1alpha1.AnalysisQuery{{Name: "errors", Query: `errors{namespace="$namespace", shard="$shard", pod=~"$pods"}`, Max: new(v1alpha1.Decimal("5"))}},
		}}
	})
	r.revise("op-v2")
	r.answers = map[string]query.Answer{}
	r.turns(20 * time.Second)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	require.Equal(t, v1alpha1.RolloutSoaking, r.rollout().Phase, "%s", r.rollout().Message)
	return r
}

const (
	ofCanary = `errors{namespace="ns", shard="op-0-canary", pod=~"(?:op-0)"}`
	ofNormal = `errors{namespace="ns", shard="op-1-normal", pod=~"(?:op-1)"}`
)

// answer lets time pass in which a query is evaluated in each turn.
func (r *rolling) answer(d time.Duration, expression string, value float64) {
	r.Helper()
	for end := r.now.Add(d); r.now.Before(end); r.turns(2 * time.Second) {
		r.answers[expression] = query.Answer{At: r.now, Numbers: 1, Min: value, Max: value}
	}
}

func TestRolloutPassesItsQueries(t *testing.T) {
	t.Parallel()
	r := querying(t)
	require.Equal(t, []query.Query{{Root: "root", Namespace: "ns", Expression: ofCanary}}, r.asked)
	r.answer(40*time.Second, ofCanary, 5)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
	require.Equal(t, []query.Query{{Root: "root", Namespace: "ns", Expression: ofNormal}}, r.asked, "the former is forgotten")
	r.answer(50*time.Second, ofNormal, 0)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2", "op-2 op-v2"}, r.made)
	require.Equal(t, v1alpha1.RolloutComplete, r.rollout().Phase, "%s", r.rollout().Message)
	require.Empty(t, r.asked)
}

func TestRolloutIsHaltedByItsQueries(t *testing.T) {
	t.Parallel()
	r := querying(t)
	r.answer(40*time.Second, ofCanary, 7.3)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase, "%s", r.rollout().Message)
	require.Equal(t, `query "errors" is 7.3, and at most 5 is allowed`, r.rollout().Failure)
	require.Equal(t, string(v1alpha1.ReasonRolloutHalted), r.condition(v1alpha1.ConditionDegraded).Reason)
	require.Empty(t, r.asked)
	r.lead() // for which it has failed, too
	r.answer(5*soak, ofCanary, 0)
	require.Equal(t, v1alpha1.RolloutHalted, r.rollout().Phase)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
}

// Without an answer the rollout neither halts nor goes on, however long that lasts.
func TestRolloutWaitsForItsQueries(t *testing.T) {
	t.Parallel()
	r := querying(t)
	r.answer(4*time.Second, ofCanary, 0) // which does not count yet
	for _, problem := range []string{"Prometheus did not answer within 10s", "its result is empty"} {
		r.answers[ofCanary] = query.Answer{At: r.now, Problem: problem}
		r.turns(time.Minute)
		require.Equal(t, v1alpha1.RolloutSoaking, r.rollout().Phase)
		require.Contains(t, r.rollout().Message, `; waiting for query "errors": `+problem)
		require.Contains(t, r.condition(v1alpha1.ConditionProgressing).Message, problem)
	}
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	r.answer(4*time.Second, ofCanary, 0)
	r.turns(4 * time.Second)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
}

// A manager that starts anew judges no answers from before.
func TestRolloutQueriesAnewAfterChangeOfManager(t *testing.T) {
	t.Parallel()
	r := querying(t)
	r.answer(8*time.Second, ofCanary, 0)
	r.lead()
	r.answer(28*time.Second, ofCanary, 0)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
	r.answer(10*time.Second, ofCanary, 0)
	require.Equal(t, []string{"op-0 op-v2", "op-1 op-v2"}, r.made)
}

func TestPausedRolloutIsQueried(t *testing.T) {
	t.Parallel()
	r := querying(t)
	r.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Rollout.Paused = true })
	r.turns(2 * time.Second)
	require.NotEmpty(t, r.asked)
	r.change(func(c *v1alpha1.ShardingConfig) {
		c.Spec.Root.Rollout.Analysis.Queries = nil
		c.Spec.Root.Rollout.Analysis.MaxRestarts = new(int32(0))
	})
	r.turns(2 * time.Second)
	require.Empty(t, r.asked)
}

func TestMessageNamesEachQueryThatLacksAnAnswer(t *testing.T) {
	t.Parallel()
	r := querying(t)
	r.change(func(c *v1alpha1.ShardingConfig) {
		q := &c.Spec.Root.Rollout.Analysis.Queries
		most := new(v1alpha1.Decimal("5"))
		*q = append(*q, v1alpha1.AnalysisQuery{Name: "known", Query: "known", Max: most}, v1alpha1.AnalysisQuery{Name: "empty", Query: "empty", Max: most})
	})
	r.turns(4 * time.Second)
	require.Len(t, r.asked, 3)
	r.answers["empty"] = query.Answer{At: r.now, Problem: "its result is empty"}
	r.answer(40*time.Second, "known", 0)
	require.Regexp(t, `; waiting for query "errors": its result counts from [0-9:]+ on; also for "empty"$`, r.rollout().Message)
	require.Equal(t, []string{"op-0 op-v2"}, r.made)
}
