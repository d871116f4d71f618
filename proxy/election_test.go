package proxy

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

const (
	recordJSON = `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"op"},"spec":{"holderIdentity":"other-1_x","leaseDurationSeconds":15,"acquireTime":"2030-01-01T00:00:00.000000Z","renewTime":"2030-01-01T00:00:00.000000Z","leaseTransitions":1}}`
	annotated  = `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"op","annotations":{"control-plane.alpha.kubernetes.io/leader":"{\"holderIdentity\":\"me\"}"}},"data":{"a":%q}}`
)

func TestRecordsOfUnknownLocksAreRefused(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	small, large := fmt.Sprintf(annotated, "b"), fmt.Sprintf(annotated, strings.Repeat("b", 1<<17))
	heartbeat := `{"metadata":{"name":"node-1"},"spec":{"holderIdentity":"node-1","leaseDurationSeconds":40,"renewTime":"2030-01-01T00:00:00.000000Z"}}`
	released := strings.Replace(recordJSON, "other-1_x", "", 1)
	const leases, other = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", "/api/v1/namespaces/kube-system"
	for name, s := range map[string]*meshv1.Sharding{"sharded": locked("s1", &meshv1.Limit{Selector: "a=b"}), "standby": standby(meshv1.Method_METHOD_AUTO)} {
		m.policy(s)
		named := s.Locks[0]
		for _, q := range []struct {
			method, target, body string
			found                bool
		}{
			{"POST", leases, strings.Replace(recordJSON, `"op"`, `"another"`, 1), true},
			{"PUT", leases + "/another", recordJSON, true},
			{"PATCH", leases + "/another", recordJSON, true},
			{"PUT", other + "/configmaps/another", small, true},
			{"POST", other + "/endpoints", strings.Replace(small, `"op"`, `"another"`, 1), true},
			{"PUT", leases + "/node-1", heartbeat, false},
			{"PUT", leases + "/another", released, false},
			{"PUT", leases + "/another---s1", recordJSON, false},
			{"PUT", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-1", recordJSON, false},
			{"POST", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", recordJSON, false},
			{"PUT", other + "/configmaps/another", large, false}, // too large to be looked at
			{"PUT", other + "/configmaps/another", `{"data":{"a":"b"}}`, false},
			{"PUT", other + "/secrets/another", small, false},
			{"DELETE", leases + "/another", "", false},
		} {
			if name == "standby" && !q.found {
				continue // leases and configmaps are divided there
			}
			m.pod.env.Observed = lock.Observations{}
			a := m.do(q.method, q.target, q.body)
			if !q.found {
				require.Equal(t, 200, a.StatusCode, "%s %s %s: %s", name, q.method, q.target, a.body)
				require.Equal(t, q.body, api.last(t).Body)
				require.Empty(t, m.pod.ObservedLocks())
				continue
			}
			require.Equal(t, 503, a.StatusCode, "%s %s %s: %s", name, q.method, q.target, a.body)
			require.Equal(t, "1", a.Header.Get("Retry-After"))
			require.Contains(t, a.body, "kube-system/another")
			seen := m.pod.ObservedLocks()
			require.Len(t, seen, 1)
			require.True(t, seen[0].Written)
			require.Equal(t, "kube-system/another", seen[0].Namespace+"/"+seen[0].Name)
			require.Contains(t, q.target, seen[0].Resource)
		}
		m.pod.env.Observed = lock.Observations{}
		a := m.do("PUT", "/apis/coordination.k8s.io/v1/namespaces/"+named.Namespace+"/leases/"+named.Name, recordJSON)
		require.Equal(t, map[string]int{"sharded": 200, "standby": 503}[name], a.StatusCode, a.body)
		require.Empty(t, m.pod.ObservedLocks(), "the policy names it")
	}
	m.policy(nil)
	require.Equal(t, 200, m.do("PUT", leases+"/another", recordJSON).StatusCode, "a pod that is no member")
}

func TestPolledLocksAreObserved(t *testing.T) {
	t.Parallel()
	answer := recordJSON
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(answer))
	}}
	m := newMesh(t, api)
	m.policy(limitTo("a=b"))
	const target = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/op"
	require.Equal(t, answer, m.do("GET", target, "").body)
	require.Equal(t, []lock.Observed{{Namespace: "kube-system", Name: "op", Resource: "leases", Holder: "other-1_x", Written: false}}, m.pod.ObservedLocks())
	require.Equal(t, 503, m.do("PUT", target, recordJSON).StatusCode)
	require.Equal(t, []lock.Observed{{Namespace: "kube-system", Name: "op", Resource: "leases", Holder: "other-1_x", Written: true}}, m.pod.ObservedLocks(), "the holder stays known")

	named := limitTo("a=b")
	named.Locks = []*meshv1.Lock{{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"}}
	m.policy(named)
	require.Empty(t, m.pod.ObservedLocks(), "the policy names it now")
	m.do("GET", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/node-1", "")
	require.Empty(t, m.pod.ObservedLocks(), "a heartbeat")

	m.policy(limitTo("a=b"))
	for _, of := range []string{"pod_1", "pod", "", strings.Repeat("x", 1<<17)} {
		m.pod.env.Observed = lock.Observations{}
		answer = strings.Replace(recordJSON, "other-1_x", of, 1)
		require.Equal(t, answer, m.do("GET", target, "").body)
		require.Empty(t, m.pod.ObservedLocks(), "held by %.10s", of)
	}
}

// A mutex between operators has the record of an election.
func TestExcludedLocksPass(t *testing.T) {
	t.Parallel()
	api := &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(recordJSON))
	}}
	m := newMesh(t, api)
	excludes := []*meshv1.ExcludedLock{{Namespace: "kube-system", Name: "op"}, {Namespace: "kube-system", Name: "node-*"}}
	const leases = "/apis/coordination.k8s.io/v1/namespaces/"
	for name, s := range map[string]*meshv1.Sharding{"sharded": limitTo("a=b"), "dry run": {Shard: "s1", DryRun: true}} {
		s.ExcludedLocks = excludes
		m.policy(s)
		for _, q := range []struct{ method, target string }{
			{"GET", leases + "kube-system/leases/op"}, {"PUT", leases + "kube-system/leases/op"}, {"PATCH", leases + "kube-system/leases/node-1"}, {"POST", leases + "kube-system/leases"},
		} {
			a := m.do(q.method, q.target, recordJSON)
			require.Equal(t, 200, a.StatusCode, "%s: %s %s", name, q.method, q.target)
			require.Equal(t, q.target, api.last(t).URI, "under its own name")
		}
		require.Empty(t, m.pod.ObservedLocks(), name)
	}
	m.policy(&meshv1.Sharding{Shard: "s1", Limits: []*meshv1.Limit{{Selector: "a=b"}}, ExcludedLocks: excludes})
	for _, other := range []string{"kube-system/leases/op2", "kube-system/leases/nod", "ns/leases/op"} {
		a := m.do("PUT", leases+other, recordJSON)
		require.Equal(t, 503, a.StatusCode, other)
		require.Contains(t, a.body, "spec.controller.excludedLocks")
	}
}

// TestDiscoveredLockIsAcquired checks an elector of client-go whose lock no policy names:
// it acquires its shard's lock soon after the policy names it.
func TestDiscoveredLockIsAcquired(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		api := &leases{t: t, objs: map[string]*coordinationv1.Lease{}}
		api.then = api.serve
		m := newMesh(t, &api.recorder)
		m.policy(limitTo("a=b"))
		config := m.config("v1")
		config.ContentType, config.AcceptContentTypes = contentType, contentType+","+runtime.ContentTypeJSON
		client, err := coordinationclient.NewForConfig(config)
		require.NoError(t, err)
		leading := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "op"}, Client: client,
				LockConfig: resourcelock.ResourceLockConfig{Identity: "pod_1"}},
			LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 100 * time.Millisecond,
			Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) { close(leading) }, OnStoppedLeading: func() {}},
		})
		require.NoError(t, err)
		ended := make(chan struct{})
		go func() { defer close(ended); elector.Run(ctx) }()
		require.Eventually(t, func() bool { return len(m.pod.ObservedLocks()) == 1 }, soon, 10*time.Millisecond)
		require.Empty(t, api.names())
		named := limitTo("a=b")
		named.Locks = []*meshv1.Lock{{Namespace: "kube-system", Name: "op", UpstreamName: "op---s1"}}
		m.policy(named)
		select {
		case <-leading:
		case <-time.After(soon):
			t.Fatal("the lock is not acquired")
		}
		require.Equal(t, []string{"op---s1"}, api.names())
		cancel()
		<-ended
	}
}
