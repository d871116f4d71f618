package node

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/inbound"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

func TestWebhooksAreCapturedWhileTheyAreRouted(t *testing.T) {
	needs.Root(t, "makes network namespaces")
	needs.Program(t, "iptables-nft")
	path, _ := inNamespace(t)
	dir, pins := t.TempDir(), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	begin := func() *running {
		r, _ := startCapturing(t, path, dir)
		steering, err := inbound.Open(pins, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		require.NoError(t, r.do(t.Context(), func() error { r.Inbound = steering; return nil }))
		t.Cleanup(func() { _ = steering.Close() })
		return r
	}
	r := begin()
	require.NoError(t, r.Store.SavePod(pods.Pod{UID: restoredPod, Namespace: "ns", Name: "a", Trust: v1alpha1.TrustMesh}))
	require.NoError(t, r.Store.SaveCluster(somewhere(t)))
	require.NoError(t, r.Store.SavePolicy(state.Saved{PodPolicy: &meshv1.PodPolicy{Uid: restoredPod, Namespace: "ns", Name: "a", Version: "1"}, Since: time.Now()}))
	r.restoreCaptured(t)
	captured := func(r *running) (yes bool) {
		require.NoError(t, r.do(t.Context(), func() error { yes = r.pods[restoredPod].redirection.webhook.captured != nil; return nil }))
		return yes
	}
	problem := func(r *running) (why string) {
		require.NoError(t, r.do(t.Context(), func() error { why = r.webhookProblem(r.pods[restoredPod]); return nil }))
		return why
	}
	require.False(t, captured(r))
	require.Empty(t, problem(r))

	routed := &meshv1.Webhooks{Version: "1", Webhooks: []*meshv1.Webhook{{
		Pods: map[string]string{restoredPod: "one", "another": "two"}, CertDir: "/nowhere/at/all", Port: 9443,
	}}}
	r.SetWebhooks(routed)
	require.True(t, captured(r))
	require.NotEmpty(t, problem(r), "there is no certificate")
	require.Empty(t, r.effects.addresses(t.Context(), restoredPod))
	later := netip.MustParseAddr("192.0.2.9")
	require.NoError(t, r.do(t.Context(), func() error {
		r.pods[restoredPod].info.Addresses = []netip.Addr{later, {}}
		return nil
	}))
	require.Equal(t, []netip.Addr{later}, r.effects.addresses(t.Context(), restoredPod))

	require.NoError(t, r.do(t.Context(), func() error { r.departure.stop(); return nil }))
	next := begin()
	next.restoreCaptured(t)
	require.True(t, captured(next), "it is known before the manager answers")
	offered, err := next.Incumbent().Offer(t.Context())
	require.NoError(t, err)
	require.Len(t, offered, 1)
	require.NotEmpty(t, offered[0].Files.Inbound)
	offered[0].Files.Close()
	require.NoError(t, next.Incumbent().Resume(t.Context()))

	next.SetWebhooks(&meshv1.Webhooks{Version: "2", Webhooks: []*meshv1.Webhook{{
		Pods: map[string]string{restoredPod: "one"}, Problem: "too large",
	}}})
	require.False(t, captured(next))
	require.Equal(t, "too large", problem(next))
	next.SetWebhooks(routed)
	require.True(t, captured(next))
	require.NotContains(t, problem(next), "too large")

	next.SetWebhooks(&meshv1.Webhooks{})
	require.False(t, captured(next))
	require.Empty(t, problem(next))
	left, err := filepath.Glob(filepath.Join(pins, "inbound_v*", "*"))
	require.NoError(t, err)
	require.Empty(t, left)

	require.NoError(t, next.do(t.Context(), func() error {
		next.Inbound, next.NoInbound = nil, errors.New("an old kernel")
		return nil
	}))
	next.SetWebhooks(routed)
	require.Contains(t, problem(next), "an old kernel")
}

func TestSignOfLifeDoesNotWaitForWebhooks(t *testing.T) {
	needs.Root(t, "makes network namespaces")
	path, _ := inNamespace(t)
	r := start(t, 0)
	steering, err := inbound.Open(filepath.Join(bpftest.BPFFS(t), "ctrlmesh"), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { _ = steering.Close() })
	_, err = steering.Capture(inbound.Request{UID: restoredPod, NetNS: path})
	require.NoError(t, err)
	require.NoError(t, r.do(t.Context(), func() error { r.Inbound = steering; return nil }))
	blocked, unblock := make(chan struct{}), make(chan struct{})
	var sweep sync.WaitGroup
	sweep.Go(func() {
		_ = steering.Sweep(func(string) bool {
			select {
			case blocked <- struct{}{}:
				<-unblock
			case <-unblock:
			}
			return true
		})
	})
	<-blocked

	socket := hold(t, filepath.Join(t.TempDir(), "sock"), offering{})
	ctx, cancel := context.WithCancel(t.Context())
	sweep.Go(func() { r.WatchHealth(ctx, socket) })
	t.Cleanup(func() { cancel(); close(unblock); sweep.Wait() })
	require.Eventually(t, func() bool { return r.backend.checks.Load() > 2 }, soon, 5*time.Millisecond)
}
