package node

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// offering is an agent that hands these pods over.
type offering struct {
	pods  []string
	heard chan string
}

func (o offering) MayTakeOver(time.Duration) error { return nil }
func (o offering) Offer(context.Context) (pods []takeover.Pod, err error) {
	for _, uid := range o.pods {
		pods = append(pods, takeover.Pod{UID: uid, Namespace: "ns", Name: "p", Files: &capture.Files{}})
	}
	return pods, nil
}
func (o offering) Yield(context.Context) (<-chan struct{}, error) {
	o.heard <- "yield"
	return nil, nil
}
func (o offering) Traffic(context.Context) map[string][]byte { return nil }
func (o offering) Resume(context.Context) error              { o.heard <- "resume"; return nil }
func (o offering) Stop(context.Context) error                { return nil }

// hold makes h the one that is asked at path.
func hold(t *testing.T, path string, h takeover.Incumbent) *takeover.Socket {
	t.Helper()
	socket, err := takeover.Listen(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.NoError(t, socket.Take())
	done := make(chan struct{})
	go func() { defer close(done); socket.Serve(t.Context(), h) }()
	t.Cleanup(func() { _ = socket.Close(); <-done })
	return socket
}

func TestSuccessorThatCannotServeDeclines(t *testing.T) {
	for name, tc := range map[string]struct {
		pods    []string
		cluster bool
		process bool
		err     string
	}{
		"what to redirect is not known": {pods: []string{uidA}, err: "not redirected"},
		"a pod is not captured":         {pods: []string{uidA}, cluster: true, process: true, err: "not here"},
		"a pod has no process now":      {pods: []string{uidA}, cluster: true},
		"a node without pods":           {},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, 0)
			if tc.process {
				needs.Root(t, "makes network namespaces")
				r.process(t, "a", "198.18.7.7")
			}
			if tc.cluster {
				require.NoError(t, r.Store.SaveCluster(somewhere(t)))
			}
			path := filepath.Join(t.TempDir(), "sock")
			heard := make(chan string, 1)
			before := hold(t, path, offering{tc.pods, heard})

			var err error
			r.in(t, func() {
				r.destinations.cluster = nil
				var socket *takeover.Socket
				if socket, err = r.TakeOver(t.Context(), path); err == nil {
					_ = socket.Close()
				}
			})

			if tc.err == "" {
				require.NoError(t, err)
				assert.Equal(t, "yield", <-heard)
				assert.False(t, before.Current())
				return
			}
			require.ErrorContains(t, err, tc.err)
			assert.Equal(t, "resume", <-heard)
			assert.True(t, before.Current())
		})
	}
}

func TestAgentOfAnOlderPodMayNotTakeOver(t *testing.T) {
	path, logger := filepath.Join(t.TempDir(), "sock"), slog.New(slog.DiscardHandler)
	dir := t.TempDir()
	old, err := takeover.PodStart(dir)
	require.NoError(t, err)
	young, err := takeover.PodStart(t.TempDir())
	require.NoError(t, err)
	assert.Less(t, old, young)
	again, err := takeover.PodStart(dir)
	require.NoError(t, err)
	assert.Equal(t, old, again, "an agent whose container restarts is as old as its pod")

	permitted := func(ctx context.Context, podStart time.Duration) bool {
		return takeover.AwaitPermission(ctx, path, podStart, logger)
	}
	assert.True(t, permitted(t.Context(), old), "nobody serves")
	r := start(t, 0)
	r.in(t, func() { r.PodStart = young })
	socket := hold(t, path, r.Incumbent())
	assert.True(t, permitted(t.Context(), young))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	assert.False(t, permitted(ctx, old))

	waited := make(chan bool)
	go func() { waited <- permitted(t.Context(), old) }()
	require.NoError(t, socket.Close())
	assert.True(t, <-waited, "the other is gone")
}

func TestPredecessorRestartsWithoutSuccessor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	ended := start(t, 0)
	require.NoError(t, ended.Incumbent().Stop(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	stays := make(chan error)
	go func() { stays <- ended.WatchSuccessor(ctx, path) }()
	r := start(t, 0)
	socket := hold(t, path, offering{})
	ends := make(chan error, 1)
	go func() { ends <- r.WatchSuccessor(t.Context(), path) }()

	_, err := r.Incumbent().Yield(t.Context())
	require.NoError(t, err)
	require.NoError(t, socket.Close())

	select {
	case err := <-ends:
		assert.ErrorContains(t, err, "restarting to serve again")
	case <-time.After(soon):
		t.Fatal("the node stays without an agent")
	}
	cancel()
	assert.NoError(t, <-stays, "it was asked to stop for good")
}

// The agent that hands over is the only one there is until its successor serves.
func TestChecksContinueUntilTheSuccessorServes(t *testing.T) {
	r := start(t, 0)
	socket := hold(t, filepath.Join(t.TempDir(), "sock"), offering{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.WatchHealth(ctx, socket) }()
	t.Cleanup(func() { cancel(); <-done })
	_, err := r.Incumbent().Offer(t.Context())
	require.NoError(t, err)
	before := r.backend.checks.Load()
	require.Eventually(t, func() bool { return r.backend.checks.Load() > before+1 }, soon, 5*time.Millisecond)
	assert.False(t, r.backend.repairs.Load(), "what the successor is about to redirect is its own")
	require.NoError(t, r.Incumbent().Resume(t.Context()))
	require.Eventually(t, r.backend.repairs.Load, soon, 5*time.Millisecond)
}

// yielding is an agent that hands nothing over.
type yielding struct {
	offering
	yields func()
}

func (y yielding) Yield(context.Context) (<-chan struct{}, error) {
	y.yields()
	return nil, nil
}

// The predecessor gives its last sign of life when it yields.
func TestSuccessorGivesASignOfLifeBeforeThePredecessorYields(t *testing.T) {
	r := start(t, 0)
	path := filepath.Join(t.TempDir(), "sock")
	given := make(chan int64, 1)
	hold(t, path, yielding{yields: func() { given <- r.backend.checks.Load() }})
	var socket *takeover.Socket
	var err error
	r.in(t, func() {
		r.destinations.cluster = nil
		socket, err = r.TakeOver(t.Context(), path)
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = socket.Close() })
	require.EqualValues(t, 1, <-given)
	require.False(t, r.backend.repairs.Load(), "the redirections are the predecessor's until then")
}

// refusing is an agent that does not let go of its pods.
type refusing struct{ offering }

func (refusing) MayTakeOver(time.Duration) error { return errors.New("being tested") }

func TestRefusedTakeoverIsNoCrash(t *testing.T) {
	r := start(t, 0)
	path := filepath.Join(t.TempDir(), "sock")
	before := hold(t, path, refusing{})
	r.in(t, func() {
		_, err := r.TakeOver(t.Context(), path)
		assert.ErrorContains(t, err, "being tested")
	})
	assert.True(t, before.Current())
}
