package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/agent/certdir"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

// decisions returns how many reviews were decided in each way by the agents.
func (w *world) decisions() map[string]float64 {
	w.Helper()
	families, err := w.registry.Gather()
	require.NoError(w, err)
	out := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "ctrlmesh_reviews_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "decision" {
					out[l.GetValue()] += m.GetCounter().GetValue()
				}
			}
		}
	}
	return out
}

// pair returns a world with two shards, whose pods are routed.
func pair(t *testing.T) (w *world, ca *authority, one, two *operator) {
	w, ca = newWorld(t), newAuthority(t)
	one, two = w.pod(1, "one", ca, nil), w.pod(2, "two", ca, nil)
	one.route(routes("one", ca, one, two))
	two.route(routes("two", ca, one, two))
	one.requireRouted()
	two.requireRouted()
	return w, ca, one, two
}

func TestReviewsReachTheOwningShard(t *testing.T) {
	w, ca, one, two := pair(t)
	for _, http2 := range []bool{true, false} {
		c := w.client(ca, http2)
		for range 3 {
			for _, at := range []*operator{one, two} {
				w.requireAnswer("one", c, at, "a")
				w.requireAnswer("two", c, at, "b")
				w.requireAnswer("two", c, at, "") // no namespace: the default shard
				w.requireAnswer(at.shard, c, at, "unowned")
				got, err := send(c, at, "", &apiextensions.ConversionReview{TypeMeta: metav1.TypeMeta{Kind: "ConversionReview", APIVersion: "apiextensions.k8s.io/v1"}})
				require.NoError(t, err)
				require.Equal(t, at.shard, got)
			}
		}
	}
	// Per turn, three of ten are another shard's. Its agent counts each once more.
	require.Equal(t, map[string]float64{review.Local: 6 * 10, review.Forwarded: 6 * 3}, w.decisions())
}

func TestReviewsOutsideTheLimitsAreAllowed(t *testing.T) {
	w, ca, one, two := pair(t)
	r := routes("one", ca, one, two)
	r.Limited = func(h route.Head) bool { return h.Namespace != "outside" }
	one.proxied.Reviews().SetRoutes(r)
	w.requireAnswer("mesh", w.client(ca, true), one, "outside")
	w.requireAnswer("two", w.client(ca, true), one, "b")
}

func TestUnreachableOwnersLeaveReviewsHere(t *testing.T) {
	for name, change := range map[string]func(r *review.Routes, two *operator){
		"no pod":           func(r *review.Routes, _ *operator) { delete(r.Pods, "two") },
		"no authority":     func(r *review.Routes, _ *operator) { r.Authorities = nil },
		"wrong authority":  func(r *review.Routes, _ *operator) { r.Authorities[name] = newAuthority(t).pool },
		"webhook is down":  func(_ *review.Routes, two *operator) { two.stop() },
		"no route to host": func(r *review.Routes, _ *operator) { r.Pods["two"] = []netip.Addr{netip.MustParseAddr("198.18.9.9")} },
	} {
		t.Run(name, func(t *testing.T) {
			w, ca, one, two := pair(t)
			r := routes("one", ca, one, two)
			change(r, two)
			one.proxied.Reviews().SetRoutes(r)
			w.requireAnswer("one", w.client(ca, true), one, "b")
			require.InDelta(t, 1, w.decisions()[review.Unreachable], 0)
		})
	}
}

// load sends reviews to a pod until it is stopped, and counts who answered. It does not count
// answers for which the machine stalled so long that the agent may have counted as dead.
func load(w *world, ca *authority, o *operator, namespace string, fresh bool) (total *atomic.Int64, stop func() map[string]int) {
	total = &atomic.Int64{}
	counts, quit, done := map[string]int{}, make(chan struct{}), make(chan struct{})
	c := w.client(ca, true)
	go func() {
		defer close(done)
		for {
			select {
			case <-quit:
				return
			default:
			}
			if fresh {
				c.CloseIdleConnections()
			}
			alive := w.alive.Load()
			who, err := ask(c, o, namespace)
			if err != nil {
				who = err.Error()
			}
			if err != nil || time.Since(*alive) < signOfLifeFor {
				counts[who]++
			}
			total.Add(1)
		}
	}()
	return total, func() map[string]int {
		close(quit)
		<-done
		w.Log(counts)
		return counts
	}
}

func awaitMore(t *testing.T, total *atomic.Int64) {
	t.Helper()
	before := total.Load()
	require.Eventually(t, func() bool { return total.Load() > before+20 }, soon, time.Millisecond)
}

func TestRotatedCertificateIsPresented(t *testing.T) {
	w, ca, one, _ := pair(t)
	total, stop := load(w, ca, one, "b", true)
	awaitMore(t, total)
	ca.issue(one.certDir, 2)
	serial := func() int64 {
		raw, err := w.apiserver.dial(t.Context(), "tcp", netip.AddrPortFrom(one.address, port).String())
		require.NoError(t, err)
		defer raw.Close()
		c := tls.Client(raw, &tls.Config{RootCAs: ca.pool, ServerName: name})
		require.NoError(t, c.Handshake())
		return c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	require.Eventually(t, func() bool { return serial() == 2 }, soon, 50*time.Millisecond)
	awaitMore(t, total)
	require.Equal(t, []string{"two"}, keys(stop()), "a review failed, or was not routed")
	require.NoError(t, one.routed.Problem())
}

func keys(counts map[string]int) (all []string) {
	for k := range maps.Keys(counts) {
		all = append(all, k)
	}
	return all
}

// The process with the certificate exits, and another one keeps listening.
func TestLastCertificateIsPresentedForSeconds(t *testing.T) {
	w, ca := newWorld(t), newAuthority(t)
	one, two := w.pod(1, "one", ca, nil), w.pod(2, "two", ca, nil)
	process := exec.Command("sleep", "1000")
	require.NoError(t, process.Start())
	var exited atomic.Bool
	exit := func() {
		if exited.CompareAndSwap(false, true) {
			_ = process.Process.Kill()
			_ = process.Wait()
		}
	}
	t.Cleanup(exit)
	one.found = func() ([]int, error) {
		if exited.Load() {
			return nil, nil
		}
		return []int{process.Process.Pid}, nil
	}
	one.route(routes("one", ca, one, two))
	two.route(routes("two", ca, one, two))
	one.requireRouted()
	two.requireRouted()
	w.requireAnswer("two", w.client(ca, true), one, "b")
	began := time.Now()
	exit()
	time.Sleep(2 * interval)
	problem := one.routed.Problem()
	who, err := ask(w.client(ca, true), one, "b")
	require.NoError(t, err)
	if took := time.Since(began); took < lastFor-interval {
		require.NoError(t, problem)
		require.Equal(t, "two", who)
	} else {
		t.Logf("the machine stalled for %s: %s answered", took, who)
	}
	require.Eventually(t, func() bool { return errors.Is(one.routed.Problem(), certdir.ErrExited) }, soon, 10*time.Millisecond)
	w.requireAnswer("one", w.client(ca, true), one, "b")
}

func TestTakeoverFailsNoReview(t *testing.T) {
	w, ca, one, _ := pair(t)
	total, stop := load(w, ca, one, "b", true)
	kept, stopKept := load(w, ca, one, "b", false)
	awaitMore(t, total)
	for range 2 {
		one.takeOver()
		awaitMore(t, total)
		awaitMore(t, kept)
	}
	require.Equal(t, []string{"two"}, keys(stop()), "a review failed, or was not routed")
	require.Equal(t, []string{"two"}, keys(stopKept()), "a review failed, or was not routed")
}

// takeOver makes another agent take the place of the one that routes the pod's reviews.
func (o *operator) takeOver() {
	w := o.w
	files, err := o.captured.Files()
	require.NoError(w, err)
	captured, proxied, routed := o.captured, o.proxied, o.routed
	w.registry = prometheus.NewRegistry()
	w.agent()
	o.route(proxied.Reviews().Routes(), files...)
	routed.Stop()
	require.NoError(w, captured.Abandon())
	require.NoError(w, proxied.Drain(w.Context()))
	o.requireRouted()
}

func TestTakeoverWaitsForTheCertificate(t *testing.T) {
	w, ca, one, _ := pair(t)
	total, stop := load(w, ca, one, "b", true)
	awaitMore(t, total)
	one.found = func() ([]int, error) {
		time.Sleep(firstLoad / 10)
		return []int{os.Getpid()}, nil
	}
	one.takeOver()
	awaitMore(t, total)
	require.Equal(t, []string{"two"}, keys(stop()), "a review failed, or was not routed")
}

func TestApplicationAnswersWithoutTheAgent(t *testing.T) {
	w, ca, one, _ := pair(t)
	total, stop := load(w, ca, one, "b", true)
	awaitMore(t, total)
	one.routed.Stop()
	require.NoError(t, one.captured.SetPorts(nil))
	awaitMore(t, total)
	require.NoError(t, one.captured.Release())
	awaitMore(t, total)
	counts := stop()
	require.Len(t, counts, 2, "a review failed")
	require.NotZero(t, counts["one"])
	require.NotZero(t, counts["two"])
}

// An agent exits without a successor.
func TestShutdownAnswersReviewsInProgress(t *testing.T) {
	w, ca, one, two := pair(t)
	started, finish := make(chan struct{}, 1), make(chan struct{})
	two.work = func() { started <- struct{}{}; <-finish }
	for _, http2 := range []bool{true, false} {
		answered := make(chan string, 1)
		go func() {
			who, err := ask(w.client(ca, http2), one, "b")
			if err != nil {
				who = err.Error()
			}
			answered <- who
		}()
		<-started
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		stopped := make(chan error, 1)
		go func() { stopped <- one.proxied.Shutdown(ctx) }()
		select {
		case who := <-answered:
			require.Fail(t, "the review was cut off", who)
		case <-time.After(100 * time.Millisecond):
		}
		finish <- struct{}{}
		require.Equal(t, "two", <-answered)
		require.NoError(t, <-stopped)
		one.routed.Stop()
		require.NoError(t, one.captured.Release())
		one.route(routes("one", ca, one, two))
		one.requireRouted()
	}
}

func TestWebhooksThatCannotBeTerminated(t *testing.T) {
	ca := newAuthority(t)
	pair := &tls.Certificate{}
	for name, c := range map[string]struct {
		config  func(*tls.Config)
		issue   *authority
		problem string
	}{
		"asks for certificates": {func(c *tls.Config) { c.ClientAuth = tls.RequestClientCert }, ca, "asks its clients for certificates"},
		"another certificate": {func(c *tls.Config) {
			c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return pair, nil }
		}, ca, "another certificate"},
		"no certificate": {func(c *tls.Config) {
			c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return pair, nil }
		}, nil, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			elsewhere := t.TempDir()
			ca.issue(elsewhere, 1)
			loaded, err := tls.LoadX509KeyPair(elsewhere+"/tls.crt", elsewhere+"/tls.key")
			require.NoError(t, err)
			*pair = loaded
			one := w.pod(1, "one", c.issue, c.config)
			one.route(routes("one", ca))
			require.Eventually(t, func() bool {
				why := one.routed.Problem()
				return why != nil && strings.Contains(why.Error(), c.problem)
			}, soon, 10*time.Millisecond, c.problem)
			w.requireAnswer("one", w.client(ca, true), one, "b")
			require.Empty(t, w.decisions(), "it was read")
		})
	}
}
