package stages

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const deployment = "/apis/apps/v1/namespaces/ns/deployments/d"

// limits puts a policy with these rules in force.
func (p *pod) limits(rules ...*meshv1.LimitRule) {
	p.t.Helper()
	p.set(&meshv1.PodPolicy{Workload: "operator", Version: "v", Traffic: limiting(rules...)})
}

func limiting(rules ...*meshv1.LimitRule) *meshv1.Traffic {
	for i, r := range rules {
		r.Name = fmt.Sprint("r", i)
		if r.Resources == nil && r.Paths == nil {
			r.Resources = []*meshv1.ResourceMatch{{}}
		}
		if r.Key == "" {
			r.Key = fmt.Sprintf("key %v", r)
		}
	}
	return &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cap", Rules: rules}}}
}

// bucket never fills again.
func bucket(burst uint32) *meshv1.Bucket {
	return &meshv1.Bucket{Burst: burst, IntervalNs: int64(time.Hour)}
}

func onlyLimits() meshv1.Trigger { return meshv1.Trigger_TRIGGER_LIMITER_ONLY }

func TestRefusalExplainsLimitThatNeverFills(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	for trigger, says := range map[meshv1.Trigger]string{
		onlyLimits():                  "raise bucket.limit",
		meshv1.Trigger_TRIGGER_NORMAL: "ctrlmesh.kusionstack.io/recover",
	} {
		m.limits(&meshv1.LimitRule{Key: says, Bucket: bucket(1), Trigger: trigger})
		require.Equal(t, 200, m.do("GET", deployment, "").code)
		first := m.do("GET", deployment, "")
		require.Equal(t, 429, first.code)
		require.Contains(t, first.body, "raise bucket.limit")
		again := m.do("GET", deployment, "")
		require.Contains(t, again.body, says)
		for _, a := range []answer{first, again} {
			require.Empty(t, a.retryAfter())
			require.NotContains(t, a.body, "try again")
		}
	}
}

func TestForced(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.limits(&meshv1.LimitRule{Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED})
	a := m.do("GET", deployment, "")
	require.Equal(t, 503, a.code)
	require.Empty(t, a.retryAfter(), "nobody knows")
	require.Contains(t, a.body, "ForceOpened")
	m.limits(&meshv1.LimitRule{Bucket: bucket(1), Trigger: meshv1.Trigger_TRIGGER_FORCE_CLOSED})
	for range 3 {
		require.Equal(t, 200, m.do("GET", deployment, "").code)
	}
}

func TestLockIsExemptFromLimitsUnlessNamed(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	const leases = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
	shard := &meshv1.Sharding{Shard: "s1", Locks: []*meshv1.Lock{{Namespace: "ns", Name: "leader", UpstreamName: "leader---s1"}}}
	set := func(s *meshv1.Sharding, names ...string) {
		m.set(&meshv1.PodPolicy{Sharding: s, Traffic: limiting(&meshv1.LimitRule{
			Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED, Resources: []*meshv1.ResourceMatch{{Names: names}},
		})})
	}
	for _, s := range []*meshv1.Sharding{nil, shard} {
		set(s)
		require.Equal(t, 503, m.do("GET", deployment, "").code)
		require.NotEqual(t, 503, m.do("GET", leases+"/leader", "").code)
		require.Equal(t, 503, m.do("GET", leases, "").code, "a list is about no lock")
		set(s, "other", "leader")
		require.Equal(t, 503, m.do("GET", leases+"/leader", "").code)
		require.NotEqual(t, 503, m.do("GET", leases+"/else", "").code)
	}
}

func TestLimitsOfNonResourcePaths(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.limits(&meshv1.LimitRule{Bucket: bucket(1), Trigger: onlyLimits(), Paths: []*meshv1.PathMatch{{Paths: []string{"/openapi*"}, Verbs: []string{"get"}}}})
	require.Equal(t, 200, m.do("GET", "/openapi/v3", "").code)
	require.Equal(t, 429, m.do("GET", "/openapi/v2", "").code)
	require.Equal(t, 200, m.do("GET", "/version", "").code)
	require.Equal(t, 200, m.do("GET", deployment, "").code)
}

func TestUserAgents(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.limits(&meshv1.LimitRule{Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED, UserAgents: []string{"wild/*"}})
	require.Equal(t, 503, m.do("GET", deployment, "", "User-Agent", "wild/1").code)
	require.Equal(t, 200, m.do("GET", deployment, "", "User-Agent", "tame/1").code)
}

func TestEarlierRefusalTakesNoToken(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	of := limiting(&meshv1.LimitRule{Key: "kept", Bucket: bucket(1), Trigger: onlyLimits()})
	m.set(&meshv1.PodPolicy{Traffic: of})
	require.Equal(t, 400, m.do("GET", "/api/v1/namespaces/ns/../pods", "").code)
	require.Equal(t, 200, m.do("GET", deployment, "").code)
	m.set(&meshv1.PodPolicy{Version: "v2", Traffic: of})
	require.Equal(t, 429, m.do("GET", deployment, "").code, "another policy leaves the rule alone")
}

// A policy with invalid rules is in force with the last valid ones.
func TestInvalidRulesKeepLastValidOnes(t *testing.T) {
	m := newPod(t)
	bad := &meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "bad", Rules: []*meshv1.LimitRule{{Name: "r", Key: "k", Bucket: &meshv1.Bucket{}}}}}}
	require.ErrorContains(t, m.set(&meshv1.PodPolicy{Traffic: bad}).Traffic.Problem, `CircuitBreaker "bad"`)
	require.Equal(t, 200, m.do("GET", deployment, "").code, "there are no good ones")

	pol := m.set(&meshv1.PodPolicy{Traffic: limiting(&meshv1.LimitRule{Bucket: bucket(1), Trigger: onlyLimits()})})
	require.NoError(t, pol.Traffic.Problem)
	require.Equal(t, "cap", pol.Traffic.Source.GetBreakers()[0].GetName())
	require.Equal(t, 200, m.do("GET", deployment, "").code)

	pol = m.set(&meshv1.PodPolicy{Refuse: "for a test", Traffic: bad})
	require.Contains(t, m.do("GET", deployment, "").body, "for a test")
	require.Error(t, pol.Traffic.Problem)
	require.Equal(t, "cap", pol.Traffic.Source.GetBreakers()[0].GetName())
	m.set(&meshv1.PodPolicy{Traffic: bad})
	require.Equal(t, 429, m.do("GET", deployment, "").code, "what was spent is")

	require.NoError(t, m.set(&meshv1.PodPolicy{Traffic: limiting()}).Traffic.Problem)
	require.Equal(t, 200, m.do("GET", deployment, "").code)
}

// What held under an earlier proxy of the pod holds until valid rules are pushed.
// Where none are known, a refusal without any does not say that there are none.
func TestRulesOfEarlierProxyStayInForce(t *testing.T) {
	t.Parallel()
	rules := func(name string, bucket *meshv1.Bucket) *meshv1.Traffic {
		return &meshv1.Traffic{
			Breakers: []*meshv1.Breaker{{Name: name, Rules: []*meshv1.LimitRule{{Name: "r", Key: "k", Bucket: bucket}}}},
			Egress:   &meshv1.Egress{Ports: []uint32{80}},
		}
	}
	good, bad := rules("good", bucket(1)), rules("bad", &meshv1.Bucket{})
	refusal := &meshv1.PodPolicy{Refuse: "for a test"}
	for _, c := range []struct {
		earlier *meshv1.Traffic
		sent    []*meshv1.PodPolicy
		holds   *meshv1.Traffic
		says    string // why it is not the last policy; "": it is
	}{
		{nil, nil, nil, ""},
		{nil, []*meshv1.PodPolicy{refusal}, nil, ""},
		{nil, []*meshv1.PodPolicy{{}}, &meshv1.Traffic{}, ""},
		{nil, []*meshv1.PodPolicy{{}, {Traffic: bad}}, &meshv1.Traffic{}, "the last good ones"},
		{nil, []*meshv1.PodPolicy{{}, refusal, {Traffic: bad}}, &meshv1.Traffic{}, "the last good ones"},
		{nil, []*meshv1.PodPolicy{refusal, {Traffic: bad}}, bad, "it is not known"},
		{good, []*meshv1.PodPolicy{refusal}, &meshv1.Traffic{}, ""},
		{good, []*meshv1.PodPolicy{{Traffic: bad}}, good, "the last good ones"},
		{bad, []*meshv1.PodPolicy{{Traffic: bad}, refusal}, bad, "it is not known"},
		{good, []*meshv1.PodPolicy{{}, {Traffic: bad}}, &meshv1.Traffic{}, "the last good ones"},
		{bad, []*meshv1.PodPolicy{{Traffic: bad}}, bad, "it is not known"},
		{bad, []*meshv1.PodPolicy{refusal, {Traffic: good}}, good, ""},
	} {
		m := newPod(t)
		m.env.Info.Traffic = c.earlier
		var holds *meshv1.Traffic
		var problem error
		for _, p := range c.sent {
			pol := m.set(p)
			holds, problem = pol.Traffic.Source, pol.Traffic.Problem
		}
		require.Equal(t, c.holds == nil, holds == nil, "%v", c)
		require.True(t, proto.Equal(c.holds, holds), "%v: %v", c, holds)
		if c.says == "" {
			require.NoError(t, problem, "%v", c)
		} else {
			require.ErrorContains(t, problem, c.says, "%v", c)
		}
	}
}
