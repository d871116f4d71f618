package proxy

import (
	"context"
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
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// TestDiscoveredLockIsAcquired checks an elector of client-go whose lock no policy names:
// it acquires its shard's lock soon after the policy names it.
func TestDiscoveredLockIsAcquired(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		api := &leases{t: t, objs: map[string]*coordinationv1.Lease{}}
		api.then = api.serve
		m := newMesh(t, &api.recorder)
		m.policy(policytest.LimitTo("a=b"))
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
		named := policytest.LimitTo("a=b")
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
