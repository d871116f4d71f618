package nri

import (
	"context"
	"log/slog"
	"path/filepath"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

type heard struct {
	started, stopped, known []Sandbox
	wait                    bool
}

func (h *heard) Started(ctx context.Context, s Sandbox) {
	h.started = append(h.started, s)
	if h.wait {
		<-ctx.Done()
	}
}
func (h *heard) Stopped(_ context.Context, s Sandbox) { h.stopped = append(h.stopped, s) }
func (h *heard) Synchronize(_ context.Context, all []Sandbox) {
	h.known = append(h.known, all...)
}

func sandbox(uid string) *api.PodSandbox {
	return &api.PodSandbox{
		Id: "sandbox-" + uid, Uid: uid, Namespace: "ns", Name: "pod-" + uid,
		Labels:      map[string]string{v1alpha1.EnableProxyLabel: "true"},
		Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh, v1alpha1.CaptureAnnotation: v1alpha1.CaptureIPTables},
		Linux:       &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "pid"}, {Type: "network", Path: "/run/netns/a"}}},
	}
}

func TestSandboxIsReportedWithItsPod(t *testing.T) {
	h := &heard{}
	p := &plugin{h}

	require.NoError(t, p.RunPodSandbox(t.Context(), sandbox("a")))
	require.NoError(t, p.StopPodSandbox(t.Context(), sandbox("a")))

	want := Sandbox{ID: "sandbox-a", Pod: pods.Pod{
		UID: "a", Namespace: "ns", Name: "pod-a", Trust: v1alpha1.TrustMesh, Capture: v1alpha1.CaptureIPTables,
	}}
	assert.Equal(t, []Sandbox{want}, h.started)
	assert.Equal(t, []Sandbox{want}, h.stopped)
}

func TestPodUnderHostNetworkIsReportedAsSuch(t *testing.T) {
	s := sandbox("a")
	s.Linux.Namespaces = s.Linux.Namespaces[:1]
	h := &heard{}
	require.NoError(t, (&plugin{h}).RunPodSandbox(t.Context(), s))
	require.Len(t, h.started, 1)
	assert.True(t, h.started[0].Pod.HostNetwork)
}

// An exited sandbox has neither a process nor a network namespace. Under hostNetwork the latter is missing, and some
// runtimes start no process for it.
func TestExitedSandboxesAreNotReported(t *testing.T) {
	exited, ofHost, alone := sandbox("a"), sandbox("b"), sandbox("c")
	for i, s := range []*api.PodSandbox{exited, ofHost, alone} {
		s.Id, s.Linux.Namespaces = strconv.Itoa(i), s.Linux.Namespaces[:1]
	}
	ofHost.Pid = 7
	containers := []*api.Container{
		{PodSandboxId: exited.Id, State: api.ContainerState_CONTAINER_STOPPED}, {PodSandboxId: alone.Id, State: api.ContainerState_CONTAINER_RUNNING},
	}
	h := &heard{}
	_, err := (&plugin{h}).Synchronize(t.Context(), []*api.PodSandbox{exited, ofHost, alone, sandbox("d")}, containers)
	require.NoError(t, err)
	var known []string
	for _, s := range h.known {
		known = append(known, s.Pod.UID)
	}
	assert.Equal(t, []string{"b", "c", "d"}, known)
}

// Only what admission let in can verify the proxy.
func TestPodsWithoutLabelAreNotReported(t *testing.T) {
	unlabelled, unadmitted := sandbox("a"), sandbox("b")
	unlabelled.Labels = nil
	unadmitted.Annotations = nil
	h := &heard{}
	p := &plugin{h}

	_, err := p.Synchronize(t.Context(), []*api.PodSandbox{unlabelled, unadmitted, sandbox("c"), nil}, nil)
	require.NoError(t, err)
	require.NoError(t, p.RunPodSandbox(t.Context(), unadmitted))

	require.Len(t, h.known, 1)
	assert.Equal(t, "c", h.known[0].Pod.UID)
	assert.Empty(t, h.started)
}

// A plugin that lets the runtime wait for longer is thrown out, and hears no more.
func TestRuntimeIsAnsweredInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		require.NoError(t, (&plugin{&heard{wait: true}}).RunPodSandbox(t.Context(), sandbox("a")))
		assert.Less(t, time.Since(start), api.DefaultPluginRequestTimeout)
	})
}

func TestAgentStartsWithoutARuntime(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	tried, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		Run(ctx, filepath.Join(t.TempDir(), "none"), &heard{}, slog.New(slog.DiscardHandler), func() { close(tried) })
	}()
	for _, c := range []chan struct{}{tried, ended} {
		select {
		case <-c:
		case <-time.After(30 * time.Second):
			t.Fatal("it waits")
		}
		cancel()
	}
}
