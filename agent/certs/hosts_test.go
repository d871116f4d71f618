package certs

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
)

// signs counts what a manager is asked.
type signs struct {
	t     *testing.T
	ca    *ecdsa.PrivateKey
	delay time.Duration

	mu    sync.Mutex
	asked []string
	now   int // under way
	most  int
	err   error
}

func newSigns(t *testing.T) *signs {
	ca, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return &signs{t: t, ca: ca, delay: 10 * time.Millisecond}
}

func (s *signs) sign(ctx context.Context, csr []byte, host string) ([][]byte, error) {
	s.mu.Lock()
	s.asked = append(s.asked, host)
	s.now++
	s.most = max(s.most, s.now)
	delay, fails := s.delay, s.err
	s.mu.Unlock()
	defer func() { s.mu.Lock(); s.now--; s.mu.Unlock() }()
	select {
	case <-time.After(delay):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if fails != nil {
		return nil, fails
	}
	req, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now(), NotAfter: time.Now().Add(24 * time.Hour), DNSNames: []string{host}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, req.PublicKey, s.ca)
	return [][]byte{der}, err
}

func (s *signs) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *signs) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.asked)
}

func newHosts(t *testing.T) (*PodHosts, *signs) {
	s := newSigns(t)
	h, err := NewHosts(s.sign)
	require.NoError(t, err)
	return h.Pod(), s
}

func TestConcurrentRequestsForOneHostAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, s := newHosts(t)
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				c, err := h.Get(t.Context(), []string{"example.com", "EXAMPLE.com."}[i%2])
				if err == nil {
					err = c.Leaf.VerifyHostname("example.com")
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		require.Equal(t, 1, s.count())
		for i := range 20 { // different hosts in turn, so that the manager is not stormed
			all.Go(func() {
				if _, err := h.Get(t.Context(), fmt.Sprint("h", i)); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		require.Equal(t, 21, s.count())
		require.Equal(t, 1, s.most)
	})
}

func TestHostCertificatesAreRenewedInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, s := newHosts(t)
		get := func() *tls.Certificate {
			t.Helper()
			c, err := h.Get(t.Context(), "example.com")
			require.NoError(t, err)
			return c
		}
		first := get()
		time.Sleep(15 * time.Hour)
		require.Same(t, first, get())
		require.Equal(t, 1, s.count())

		s.fail(errors.New("away"))
		time.Sleep(2 * time.Hour)
		require.Same(t, first, get(), "it serves while it is renewed")
		synctest.Wait()
		time.Sleep(time.Second)
		require.Same(t, first, get(), "and while it cannot be")
		require.Equal(t, 2, s.count())
		time.Sleep(refusedFor)
		s.fail(nil)
		require.Same(t, first, get())
		time.Sleep(time.Second)
		require.NotSame(t, first, get())
		require.Equal(t, 3, s.count())

		s.fail(errors.New("away"))
		time.Sleep(24 * time.Hour)
		_, err := h.Get(t.Context(), "example.com")
		require.ErrorContains(t, err, "away", "never one that has expired")
	})
}

func TestRefusedHostsAreCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, s := newHosts(t)
		s.fail(errors.New("away"))
		for range 5 {
			_, err := h.Get(t.Context(), "example.com")
			require.ErrorContains(t, err, "away")
		}
		require.Equal(t, 1, s.count())
		s.fail(nil)
		time.Sleep(refusedFor)
		_, err := h.Get(t.Context(), "example.com")
		require.NoError(t, err)
		for _, host := range []string{"", ".", strings.Repeat("a", 254)} {
			_, err := h.Get(t.Context(), host)
			require.Error(t, err)
		}
		require.Equal(t, 2, s.count())

		// Who gives up does not take the answer from others.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = h.Get(ctx, "slow")
		require.ErrorIs(t, err, context.Canceled)
		_, err = h.Get(t.Context(), "slow")
		require.NoError(t, err)
		require.Equal(t, 3, s.count())

		s.delay = time.Hour
		start := time.Now()
		_, err = h.Get(t.Context(), "hangs")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, askFor, time.Since(start))
	})
}

func TestKeptHostCertificatesAreBounded(t *testing.T) {
	h, s := newHosts(t)
	s.delay = 0
	s.fail(errors.New("away"))
	h.limit.SetLimit(rate.Inf)
	for i := range 2 * maxHosts {
		_, err := h.Get(t.Context(), fmt.Sprint("h", i))
		require.Error(t, err)
	}
	require.Equal(t, maxHosts, h.hosts.kept.Len())
}

// A pod with ever new names uses up nobody's budget but its own.
func TestRequestsAreLimitedByPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, s := newHosts(t)
		other := h.hosts.Pod()
		first, err := other.Get(t.Context(), "example.com")
		require.NoError(t, err)
		for i := range 10 * askBurst {
			_, _ = h.Get(t.Context(), fmt.Sprint("h", i))
		}
		require.InDelta(t, 1+askBurst, s.count(), 2)
		asked := s.count()
		_, err = h.Get(t.Context(), "more")
		require.ErrorIs(t, err, errBudget)
		shared, err := h.Get(t.Context(), "example.com")
		require.NoError(t, err, "what is there is anybody's")
		require.Same(t, first, shared)
		require.Equal(t, asked, s.count())
		_, err = other.Get(t.Context(), "more")
		require.NoError(t, err)
		time.Sleep(time.Duration(float64(time.Second) / askRate))
		_, err = h.Get(t.Context(), "yet more")
		require.NoError(t, err, "the budget comes back")
	})
}

// However many names of one pod wait for a slow manager, another waits for one of them.
func TestPodsTakeTurnsAtTheManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, s := newHosts(t)
		s.delay = time.Second
		var all sync.WaitGroup
		for i := range askBurst {
			all.Go(func() { _, _ = h.Get(t.Context(), fmt.Sprint("h", i)) })
		}
		synctest.Wait()
		start := time.Now()
		_, err := h.hosts.Pod().Get(t.Context(), "example.com")
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(start), 3*s.delay)
		all.Wait()
	})
}

// A certificate of a key that is not ours would fail each handshake.
func TestCertificateOfAnotherKeyIsRejected(t *testing.T) {
	s := newSigns(t)
	other, err := NewHosts(s.sign)
	require.NoError(t, err)
	h, err := NewHosts(func(ctx context.Context, _ []byte, host string) ([][]byte, error) {
		return s.sign(ctx, other.csr, host)
	})
	require.NoError(t, err)
	_, err = h.Pod().Get(t.Context(), "example.com")
	require.ErrorContains(t, err, "another key")
}
