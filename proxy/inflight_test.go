package proxy

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

func TestHowLongAWriteMayStillTakeEffect(t *testing.T) {
	broken := func(errno syscall.Errno) error {
		return fmt.Errorf("handled: %w", &net.OpError{Op: "read", Err: os.NewSyscallError("read", errno)})
	}
	for name, c := range map[string]struct {
		err    error
		code   int
		unsent bool
		want   time.Duration
	}{
		"answered":                    {code: http.StatusOK},
		"refused":                     {code: http.StatusConflict},
		"failed upstream":             {code: http.StatusGatewayTimeout, want: LostWrite},
		"never left":                  {err: broken(syscall.ETIMEDOUT), unsent: true},
		"ended by the apiserver":      {err: io.EOF, want: LostWrite},
		"reset":                       {err: broken(syscall.ECONNRESET), want: LostWrite},
		"closed here":                 {err: net.ErrClosed, want: LostWrite},
		"the client's body cut short": {err: &upstream.BodyError{Err: io.ErrNoProgress}, want: LostWrite},
		"the pod ended":               {err: errShutdown, want: LostWrite},
		"the apiserver fell silent":   {err: broken(syscall.ETIMEDOUT), want: UnseenWrite(nil)},
		"no way to it any more":       {err: broken(syscall.EHOSTUNREACH), want: UnseenWrite(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				over := make(chan struct{})
				x := &exchange{pod: &Pod{}, policy: &policy{}, counted: true, sent: time.Now()}
				if c.unsent {
					x.sent = time.Time{}
				}
				x.policy.writes.over = func() { close(over) }
				x.policy.writes.raise()
				began := time.Now()
				x.answered(&http.Response{StatusCode: c.code}, c.err)
				<-over
				require.Equal(t, c.want, time.Since(began))
			})
		})
	}
}

func TestLostWriteCountsUntilTheRequestTimeoutOfThePolicy(t *testing.T) {
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
				require.Equal(t, c.want, UnseenWrite(c.policies[0]))
			}
		})
	}
}

// Nobody sees what goes through a tunnel, so its writes are waited for unseen.
func TestWhatWasTunnelledMayStillTakeEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &Pod{}
		policies := []*policy{{passthrough: true}, {passthrough: true}, {}, {}}
		var old *policy
		for i, next := range policies {
			next.settled, next.replaced = make(chan struct{}), make(chan struct{})
			next.writes.n.Store(2)
			began := time.Now()
			p.succeed(old, next)
			<-next.settled
			want := time.Duration(0)
			if i == 2 {
				want = LostWrite
			}
			require.Equal(t, want, time.Since(began), "policy %d", i)
			old = next
		}
	})
}
