package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/upstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/writes"
)

func TestCompletionOfWriteByItsEnd(t *testing.T) {
	t.Parallel()
	broken := func(errno syscall.Errno) error {
		return fmt.Errorf("handled: %w", &net.OpError{Op: "read", Err: os.NewSyscallError("read", errno)})
	}
	for name, c := range map[string]struct {
		err     error
		code    int
		group   string
		member  bool
		media   string
		unsent  bool
		late    bool
		offline bool
		want    time.Duration
	}{
		"answered":                    {code: http.StatusOK},
		"refused":                     {code: http.StatusConflict},
		"failed":                      {code: http.StatusInternalServerError, media: jsonType, want: meshv1.LostWrite},
		"failed, as protobuf":         {code: http.StatusInternalServerError, media: protoType, want: meshv1.LostWrite},
		"unavailable":                 {code: http.StatusServiceUnavailable, media: jsonType + "; charset=utf-8", want: meshv1.LostWrite},
		"failed in a proxy":           {code: http.StatusServiceUnavailable, media: "text/plain; charset=utf-8", want: writes.Unseen(nil)},
		"failed without a type":       {code: http.StatusBadGateway, want: writes.Unseen(nil)},
		"failed in another group":     {group: "example.com", code: http.StatusInternalServerError, media: jsonType, want: writes.Unseen(nil)},
		"failed in metrics.k8s.io":    {group: "metrics.k8s.io", code: http.StatusGatewayTimeout, media: jsonType, want: writes.Unseen(nil)},
		"answered in another group":   {group: "example.com", code: http.StatusConflict},
		"failed in a member":          {member: true, code: http.StatusInternalServerError, media: jsonType, want: writes.Unseen(nil)},
		"answered in a member":        {member: true, code: http.StatusConflict},
		"cut short, for a member":     {member: true, err: &upstream.BodyError{Err: io.ErrNoProgress}, want: writes.Unseen(nil)},
		"never left":                  {err: broken(syscall.ETIMEDOUT), unsent: true},
		"ended by the apiserver":      {err: io.EOF, want: meshv1.LostWrite},
		"reset":                       {err: broken(syscall.ECONNRESET), want: meshv1.LostWrite},
		"closed here":                 {err: net.ErrClosed, want: writes.Unseen(nil)},
		"cancelled here":              {err: context.Canceled, want: writes.Unseen(nil)},
		"the client's body cut short": {err: &upstream.BodyError{Err: io.ErrNoProgress}, want: meshv1.LostWrite},
		"the pod ended":               {err: errShutdown, want: writes.Unseen(nil)},
		"waited for after the pod":    {err: context.Canceled, late: true, want: meshv1.LostWrite},
		"the pod's network is gone":   {err: context.Canceled, offline: true, want: writes.Unseen(nil)},
		"answered before it went":     {code: http.StatusOK, offline: true},
		"the apiserver fell silent":   {err: broken(syscall.ETIMEDOUT), want: writes.Unseen(nil)},
		"no way to it any more":       {err: broken(syscall.EHOSTUNREACH), want: writes.Unseen(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				over := make(chan struct{})
				writing, end := context.WithCancelCause(t.Context())
				defer end(nil)
				if c.late {
					end(nil)
				}
				if c.offline {
					end(errUnanswerable)
				}
				x := &exchange{
					pod: &Pod{lifetime: lifetime{writing: writing}}, sending: upstream.Request{Sent: time.Now()},
					policy: &stages.Policy{}, counted: true,
					State: pipeline.State{Decision: pipeline.Decision{Plan: &pipeline.Plan{Key: match.Kind{Verb: "update", Group: c.group, Resource: "things", MemberCluster: c.member}}}},
				}
				if c.unsent {
					x.sending.Sent = time.Time{}
				}
				x.policy.Succession.Writes.Over(func() { close(over) })
				x.policy.Succession.Writes.Raise()
				began := time.Now()
				x.answered(&upstream.Response{Status: c.code, Header: header.Fields{{Name: "Content-Type", Value: c.media}}}, c.err)
				<-over
				require.Equal(t, c.want, time.Since(began))
			})
		})
	}
}

func TestLostWriteCountsUntilTheRequestTimeoutOfThePolicy(t *testing.T) {
	t.Parallel()
	sharding := func(seconds uint32) *meshv1.PodPolicy {
		return &meshv1.PodPolicy{Sharding: &meshv1.Sharding{RequestTimeoutSeconds: seconds}}
	}
	refusal := &meshv1.PodPolicy{Refuse: "no shard yet"}
	for name, c := range map[string]struct {
		policies []*meshv1.PodPolicy
		want     time.Duration
	}{
		"no policy":         {want: 65 * time.Second},
		"not set":           {[]*meshv1.PodPolicy{sharding(0)}, 65 * time.Second},
		"set":               {[]*meshv1.PodPolicy{sharding(300)}, 305 * time.Second},
		"kept by a refusal": {[]*meshv1.PodPolicy{sharding(300), refusal}, 305 * time.Second},
		"reset":             {[]*meshv1.PodPolicy{sharding(300), refusal, sharding(0)}, 65 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, &recorder{})
			for _, p := range c.policies {
				m.set(p)
			}
			require.Equal(t, c.want, m.pod.unseen())
			if n := len(c.policies); n == 1 {
				require.Equal(t, c.want, writes.Unseen(c.policies[0]))
			}
		})
	}
}

// Nobody sees what goes through a tunnel, so its writes are waited for unseen.
func TestTunnelledWritesDelaySettling(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &Pod{}
		p.accepting.tunnels.last = time.Now()
		policies := []*stages.Policy{{Passthrough: true}, {Passthrough: true}, {}, {}}
		var old *stages.Policy
		for i, next := range policies {
			next.Succession.Settled, next.Succession.Replaced = make(chan struct{}), make(chan struct{})
			next.Succession.Writes.Raise()
			next.Succession.Writes.Raise()
			began := time.Now()
			p.succeed(old, next)
			<-next.Succession.Settled
			want := time.Duration(0)
			if i == 2 {
				want = writes.Unseen(nil)
			}
			require.Equal(t, want, time.Since(began), "policy %d", i)
			old = next
		}
	})
}

func TestPolicySettlesAtOnceWithoutTunnels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var tunnels tunnels
		require.Zero(t, tunnels.remain(time.Minute), "never one")
		tunnels.add(1)
		time.Sleep(time.Hour)
		require.Equal(t, time.Minute, tunnels.remain(time.Minute), "one is open")
		tunnels.add(-1)
		time.Sleep(20 * time.Second)
		require.Equal(t, 40*time.Second, tunnels.remain(time.Minute))
		time.Sleep(time.Minute)
		require.Zero(t, tunnels.remain(time.Minute))
	})
}

// The pod's end does not break what only its response can settle.
func TestWriteOutlivesItsPod(t *testing.T) {
	t.Parallel()
	api := held{make(chan struct{}), make(chan struct{})}
	m := newMesh(t, api)
	m.policy(policytest.Owning("a"))
	req, err := http.NewRequest("PUT", "https://kubernetes.default.svc/api/v1/namespaces/a/pods/x", strings.NewReader("{}"))
	require.NoError(t, err)
	go func() {
		if resp, err := m.client(true).Do(req); err == nil {
			_ = resp.Body.Close()
		}
	}()
	<-api.arrived
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.pod.Shutdown(ctx), context.DeadlineExceeded)
	settled := m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "2", Refuse: "the pod has ended"})
	select {
	case <-settled:
		t.Fatal("settled while the apiserver is at it")
	case <-time.After(50 * time.Millisecond):
	}
	close(api.answer)
	select {
	case <-settled:
	case <-time.After(soon):
		t.Fatal("the response came")
	}
}

// No response arrives over a network that is gone.
func TestWriteOfPodWithoutNetwork(t *testing.T) {
	t.Parallel()
	api := held{make(chan struct{}), make(chan struct{})}
	defer close(api.answer)
	m := newMesh(t, api)
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "1", Sharding: &meshv1.Sharding{RequestTimeoutSeconds: 1}})
	go m.do("PUT", "/api/v1/namespaces/a/pods/x", "{}")
	<-api.arrived
	settled := m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "2", Refuse: "the pod has ended"})
	began := time.Now()
	m.pod.Unanswerable()
	select {
	case <-settled:
		require.GreaterOrEqual(t, time.Since(began), time.Second+meshv1.LostWrite)
	case <-time.After(soon):
		t.Fatal("the response is still awaited")
	}
}

// recorded is a Journal.
type recorded struct {
	open, lost, unseen atomic.Int64
}

func (r *recorded) Begin()                 { r.open.Add(1) }
func (r *recorded) End()                   { r.open.Add(-1) }
func (r *recorded) Lose(d time.Duration)   { r.lost.Store(int64(d)); r.End() }
func (r *recorded) Unseen(d time.Duration) { r.unseen.Store(int64(d)) }

func TestJournalHasWritesWhileTheyAreInFlight(t *testing.T) {
	t.Parallel()
	api := held{make(chan struct{}), make(chan struct{})}
	m := newMesh(t, api)
	var journal recorded
	m.pod.env.Info.Journal = &journal
	m.set(&meshv1.PodPolicy{Uid: "uid-1", Version: "1", Sharding: &meshv1.Sharding{RequestTimeoutSeconds: 30}})
	require.EqualValues(t, 35*time.Second, journal.unseen.Load())
	for range 3 {
		done := make(chan struct{})
		go func() { defer close(done); m.do("PUT", "/api/v1/namespaces/a/pods/x", "{}") }()
		<-api.arrived
		require.EqualValues(t, 1, journal.open.Load())
		api.answer <- struct{}{}
		<-done
		require.Zero(t, journal.open.Load())
	}
	require.Zero(t, journal.lost.Load())

	done := make(chan struct{})
	go func() { defer close(done); m.do("PUT", "/api/v1/namespaces/a/pods/x", "{}") }()
	<-api.arrived
	m.api.CloseClientConnections()
	<-done
	require.Zero(t, journal.open.Load())
	require.EqualValues(t, meshv1.LostWrite, journal.lost.Load(), "the apiserver ended it")
	close(api.answer)
}
