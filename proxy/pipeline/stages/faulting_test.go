package stages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
)

// faults puts a policy with these rules in force.
func (p *pod) faults(rules ...*meshv1.FaultRule) {
	p.t.Helper()
	for i, r := range rules {
		r.Name = fmt.Sprint("r", i)
		r.Key = fmt.Sprintf("key %v", r)
	}
	p.set(&meshv1.PodPolicy{Workload: "operator", Version: "v", Traffic: &meshv1.Traffic{
		Injections: []*meshv1.Injection{{Name: "chaos", Rules: rules}},
	}})
}

func TestAbortEqualsApiserverError(t *testing.T) {
	m := newPod(t)
	for _, c := range []struct {
		method, target string
		status         uint32
		said           string // by the rule
		is             func(error) bool
		name           string
	}{
		{"PUT", deployment, 409, "", apierrors.IsConflict, "d"},
		{"POST", "/apis/apps/v1/namespaces/ns/deployments", 409, "", apierrors.IsAlreadyExists, ""},
		{"GET", deployment, 404, "", apierrors.IsNotFound, "d"},
		{"GET", deployment, 429, "", apierrors.IsTooManyRequests, "d"},
		{"GET", "/apis/apps/v1/deployments?watch=1", 410, "", apierrors.IsResourceExpired, ""},
		{"GET", "/apis/apps/v1/deployments", 500, "", apierrors.IsInternalError, ""},
		{"GET", "/apis/apps/v1/deployments", 503, "", apierrors.IsServiceUnavailable, ""},
		{"GET", deployment, 504, "", apierrors.IsTimeout, "d"},
		{"PATCH", deployment, 422, "", apierrors.IsInvalid, "d"},
		{"DELETE", deployment, 403, "", apierrors.IsForbidden, "d"},
		{"POST", "/apis/apps/v1/namespaces/ns/deployments", 413, "", apierrors.IsRequestEntityTooLargeError, ""},
		{"GET", deployment, 410, "Gone", apierrors.IsGone, "d"},
	} {
		m.faults(&meshv1.FaultRule{Abort: &meshv1.Abort{Status: c.status, Reason: c.said, Percent: 100}})
		a := m.do(c.method, c.target, "")
		require.Equal(t, int(c.status), a.code)
		require.Equal(t, meshv1.RefusedFault, a.reason)
		require.True(t, c.is(&apierrors.StatusError{ErrStatus: a.status}), "%+v", a.status)
		require.Contains(t, a.body, "ctrlmesh: injected by FaultInjection ns/chaos/r0")
		require.Equal(t, "apps deployments "+c.name, a.status.Details.Group+" "+a.status.Details.Kind+" "+a.status.Details.Name)
		require.Equal(t, map[bool]string{true: "1"}[c.status == 429], a.retryAfter())
	}
	require.Empty(t, m.requests, "nothing was sent on")
}

func TestOtherAbortsHaveNoStatus(t *testing.T) {
	m := newPod(t)
	for _, code := range []uint32{200, 204, 302} {
		m.faults(&meshv1.FaultRule{Abort: &meshv1.Abort{Status: code, Percent: 100}})
		a := m.do("PUT", deployment, "{}")
		require.EqualValues(t, code, a.code)
		require.Empty(t, a.body)
	}
	m.faults(&meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 100}})
	pol := m.env.Policy.Load()
	require.Same(t, pipeline.Reset, pol.Evaluate(m.state("PUT", deployment, "{}")))
	require.Empty(t, m.requests, "nothing was sent on")
}

func TestDrainingPodInjectsNoFaults(t *testing.T) {
	m := newDraining(t)
	m.faults(&meshv1.FaultRule{Abort: &meshv1.Abort{Status: 500, Percent: 100}})
	require.Equal(t, 200, m.do("GET", deployment, "").code)
}

func TestFaultsRepeatWithTheirSeed(t *testing.T) {
	t.Parallel()
	run := func() (codes []int) {
		m := newPod(t)
		m.faults(&meshv1.FaultRule{Seed: new(int64(42)), Abort: &meshv1.Abort{Status: 500, Percent: 40}})
		for range 50 {
			codes = append(codes, m.do("GET", deployment, "").code)
		}
		return codes
	}
	first := run()
	require.Contains(t, first, 200)
	require.Contains(t, first, 500)
	require.Equal(t, first, run())
}

func TestFaultsOfDiscovery(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	m.faults(&meshv1.FaultRule{
		Paths: []*meshv1.PathMatch{{Paths: []string{"/apis*"}, Verbs: []string{"get"}}},
		Abort: &meshv1.Abort{Status: 503, Percent: 100},
	})
	require.Equal(t, 503, m.do("GET", "/apis/apps/v1", "").code)
	require.Equal(t, 200, m.do("GET", "/api", "").code)
	require.Equal(t, 200, m.do("GET", deployment, "").code)
}

func TestFaultsSkipLocksThatTheyDoNotName(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	const lease = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/"
	m.faults(&meshv1.FaultRule{Abort: &meshv1.Abort{Status: 500, Percent: 100}})
	require.Equal(t, 200, m.do("GET", lease+"leader", "").code)
	require.Equal(t, 500, m.do("GET", strings.TrimSuffix(lease, "/"), "").code, "no one's lock")
	m.faults(&meshv1.FaultRule{
		Resources: []*meshv1.ResourceMatch{{Names: []string{"leader"}}},
		Abort:     &meshv1.Abort{Status: 500, Percent: 100},
	})
	require.Equal(t, 500, m.do("GET", lease+"leader", "").code)
	require.Equal(t, 200, m.do("GET", lease+"other", "").code)
}

func TestFaultsOfWatches(t *testing.T) {
	const (
		watch = "/api/v1/configmaps?watch=1"
		event = `{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"namespace":"a","name":"x","resourceVersion":"7"}}}` + "\n"
	)
	duplicate := &meshv1.WatchFault{Duplicate: &meshv1.WatchFault_Duplicate{Percent: 100}}
	for name, c := range map[string]struct {
		fault                 *meshv1.WatchFault
		contentType, encoding string
		want, skipped         string
	}{
		"duplicate":  {duplicate, typeJSON, "", event + event, ""},
		"unreadable": {duplicate, "application/cbor-seq", "", event, "content type cannot be filtered"},
		"compressed": {duplicate, typeJSON, "gzip", event, "the events are encoded"},
		"no fault":   {nil, typeJSON, "", event, ""},
	} {
		t.Run(name, func(t *testing.T) {
			m := newPod(t)
			m.faults(&meshv1.FaultRule{Watch: c.fault, Resources: []*meshv1.ResourceMatch{{Resources: []string{"configmaps"}, Verbs: []string{"watch"}}}})
			m.api = func(*upstream.Request) upstream.Response {
				r := response(200, c.contentType, event)
				if c.encoding != "" {
					r.Header.Set("Content-Encoding", c.encoding)
				}
				return r
			}
			a := m.do("GET", watch, "", "Accept-Encoding", "gzip")
			require.Equal(t, 200, a.code, a.body)
			require.Equal(t, c.want, a.body)
			require.Equal(t, c.skipped != "", a.Injection.Skipped != "")
			require.Contains(t, a.Injection.Skipped, c.skipped)
			require.Equal(t, c.fault == nil, m.last().Header.Get("Accept-Encoding") != "", "events must be readable")
		})
	}
}

func TestDelayHappensOnce(t *testing.T) {
	m := newPod(t)
	m.faults(&meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: 1, Percent: 100}})
	x := m.state("GET", deployment, "")
	require.Equal(t, 200, m.decide(x).code)
	require.Zero(t, x.Injection.Faults.Delay, "a request that starts over waits no more")
}
