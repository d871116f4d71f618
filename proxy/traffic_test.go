package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// A policy whose rules cannot be is in force all the same, with the last good rules.
func TestRulesThatCannotBeDoNotHoldBackTheRest(t *testing.T) {
	api := &recorder{}
	m := newMesh(t, api)
	bad := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "bad", Rules: []*meshv1.LimitRule{{Name: "r", Key: "k", Bucket: &meshv1.Bucket{}}}}}}
	m.traffic(bad)
	_, problem := m.pod.Traffic()
	require.ErrorContains(t, problem, `CircuitBreaker "bad"`)
	require.Equal(t, 200, m.do("GET", deployment, "").StatusCode, "there are no good ones")

	m.limits(&meshv1.LimitRule{Bucket: bucket(1), Trigger: onlyLimits()})
	told, problem := m.pod.Traffic()
	require.NoError(t, problem)
	require.Equal(t, "cap", told.GetBreakers()[0].GetName())
	require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)

	m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "next", Refuse: "for a test", Traffic: bad})
	require.Contains(t, m.do("GET", deployment, "").body, "for a test")
	told, problem = m.pod.Traffic()
	require.Error(t, problem)
	require.Equal(t, "cap", told.GetBreakers()[0].GetName())
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "v3", Traffic: bad})
	require.Equal(t, 429, m.do("GET", deployment, "").StatusCode, "what was spent is")

	m.limits()
	_, problem = m.pod.Traffic()
	require.NoError(t, problem)
	require.Equal(t, 200, m.do("GET", deployment, "").StatusCode)
}

// No request is decided about by rules that do not know yet what another proxy told.
func TestRulesKnowWhatWasCountedBeforeTheyAreAsked(t *testing.T) {
	rules := func() *meshv1.Traffic {
		return &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cap", Rules: named([]*meshv1.LimitRule{{Bucket: bucket(1)}})}}}
	}
	old := newMesh(t, &recorder{})
	old.traffic(rules())
	require.Equal(t, 200, old.do("GET", deployment, "").StatusCode)
	require.Equal(t, 429, old.do("GET", deployment, "").StatusCode)
	data, err := old.pod.ExportTraffic()
	require.NoError(t, err)

	next := newMesh(t, &recorder{}).pod
	require.NoError(t, next.ImportTraffic(data))
	before := next.policy.Load()
	next.histories.mu.Lock() // what is enforced last
	done := make(chan error, 1)
	go func() {
		_, err := next.SetPolicy(&meshv1.PodPolicy{Uid: "uid-1", Version: "v", Traffic: rules()})
		done <- err
	}()
	require.Eventually(t, func() bool {
		states := next.RuleStates()
		return len(states) == 1 && states[0].State == meshv1.BreakerState_BREAKER_OPENED
	}, 5*time.Second, time.Millisecond)
	during := next.policy.Load()
	next.histories.mu.Unlock()
	require.NoError(t, <-done)
	require.Same(t, before, during)
	require.NotSame(t, before, next.policy.Load())
}
