package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

// succession returns a function that puts another proxy behind the listener of
// m's, and drains the one before.
func (m *mesh) succession(l *net.TCPListener) (handOver func()) {
	m.t.Helper()
	current, at := m.pod, l
	return func() {
		m.t.Helper()
		file, err := at.File()
		require.NoError(m.t, err)
		copied, err := net.FileListener(file)
		require.NoError(m.t, err)
		require.NoError(m.t, file.Close())
		server, err := New(Config{Leaf: m.server.config.Leaf})
		require.NoError(m.t, err)
		require.NoError(m.t, server.SetCluster(m.cluster()))
		next := server.Pod(current.env.Info, m.dial)
		require.NoError(m.t, next.Restore(&meshv1.PodPolicy{Uid: "uid-1", Version: "v"}, time.Time{}))
		served := make(chan error, 1)
		go func() { served <- next.Serve(copied) }()
		m.t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_ = next.Shutdown(ctx)
			require.NoError(m.t, <-served)
		})
		ctx, cancel := context.WithTimeout(m.t.Context(), soon)
		defer cancel()
		start := time.Now()
		require.NoError(m.t, current.Drain(ctx))
		m.t.Logf("drained in %v", time.Since(start).Round(time.Millisecond))
		current, at = next, copied.(*net.TCPListener)
	}
}

// handed is newMesh with a listener to hand over.
func handed(t *testing.T, h http.Handler) (*mesh, func()) {
	m := newMesh(t, h)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m.addr = l.Addr().String()
	go func() { _ = m.pod.Serve(l) }()
	return m, m.succession(l.(*net.TCPListener))
}

func (s *store) lists() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.requests {
		if !strings.Contains(q, "watch=") || strings.Contains(q, "sendInitialEvents=true") {
			n++
		}
	}
	return n
}

// A client that asks all the time while one proxy takes over from another meets no
// error, and no informer lists again.
func TestTakeoverIsInvisibleToClients(t *testing.T) {
	t.Parallel()
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("streams=%t", streams), func(t *testing.T) {
			t.Parallel()
			pods := &store{streams: streams, pods: []*corev1.Pod{pod("a", "1", "1"), pod("b", "2", "2")}}
			m, handOver := handed(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.HasPrefix(r.URL.Path, "/api/v1/pods") {
					pods.ServeHTTP(w, r)
					return
				}
				_, _ = io.Copy(io.Discard, r.Body)
				if strings.HasSuffix(r.URL.Path, "slow") {
					time.Sleep(300 * time.Millisecond)
				}
				_, _ = io.WriteString(w, `{}`)
			}))
			m.policy(nil)

			stop := make(chan struct{})
			var wg sync.WaitGroup
			var asked atomic.Int64
			const pause = 5 * time.Millisecond // to leave processor time to what is tested
			failed := make(chan error, 1000)
			ask := func(c *http.Client, method, path, body string, pause time.Duration) {
				for {
					select {
					case <-stop:
						return
					case <-time.After(pause):
					}
					var r io.Reader
					if body != "" {
						r = strings.NewReader(body)
					}
					req, err := http.NewRequest(method, "https://kubernetes.default.svc/api/v1/namespaces/ns/"+path, r)
					if err == nil {
						var resp *http.Response
						if resp, err = c.Do(req); err == nil {
							_, err = io.Copy(io.Discard, resp.Body)
							_ = resp.Body.Close()
							if resp.StatusCode != 200 {
								err = errors.New(resp.Status)
							}
						}
					}
					asked.Add(1)
					if err != nil {
						failed <- fmt.Errorf("%s %s: %w", method, path, err)
					}
				}
			}
			for _, http2 := range []bool{true, false} {
				c := m.client(http2)
				for range 3 {
					wg.Go(func() { ask(c, "GET", "secrets/a", "", pause) })
					wg.Go(func() { ask(c, "POST", "secrets", `{"a":"b"}`, pause) })
					wg.Go(func() { ask(c, "PUT", "secrets/slow", `{"a":"b"}`, pause) })
				}
				wg.Go(func() { ask(m.client(http2), "POST", "secrets", `{"a":"b"}`, 700*time.Millisecond) }) // mostly idle
			}
			informers := make([]cache.SharedInformer, 0, 4)
			for range cap(informers) {
				config := m.config("v1")
				if len(informers)%2 == 1 {
					config.NextProtos = []string{"http/1.1"}
				}
				client, err := kubernetes.NewForConfig(config)
				require.NoError(t, err)
				lw := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "pods", "", fields.Everything())
				informer := cache.NewSharedInformer(cache.ToListWatcherWithWatchListSemantics(lw, client), &corev1.Pod{}, 0)
				informers = append(informers, informer)
				wg.Go(func() { informer.Run(stop) })
			}
			for _, i := range informers {
				require.Eventually(t, i.HasSynced, time.Minute, time.Millisecond)
			}
			before := pods.lists()
			for range 2 { // right after watches began
				handOver()
			}
			close(stop)
			wg.Wait()
			close(failed)
			failures := len(failed)
			for err := range failed {
				t.Error(err)
			}
			require.Equal(t, before, pods.lists(), "an informer listed again")
			t.Logf("hand-overs=2 requests=%d failed=%d relists=%d", asked.Load(), failures, pods.lists()-before)
		})
	}
}

func TestWatchesEndCleanlyWhileDraining(t *testing.T) {
	t.Parallel()
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	m.policy(nil)
	start := time.Now()
	var wg sync.WaitGroup
	for _, http2 := range []bool{true, false} {
		c := m.client(http2)
		resp, err := c.Get("https://kubernetes.default.svc/api/v1/pods?watch=1")
		require.NoError(t, err)
		wg.Go(func() {
			defer c.CloseIdleConnections()
			defer resp.Body.Close()
			_, err := io.ReadAll(resp.Body)
			assert.NoError(t, err, "a proper end")
			assert.GreaterOrEqual(t, time.Since(start), minWatch)
		})
	}
	require.NoError(t, m.pod.Drain(t.Context()))
	wg.Wait()
}

func TestInitialEventsAreFollowedToTheirEnd(t *testing.T) {
	t.Parallel()
	end := string(pipeline.EndOfInitial)
	for _, pieces := range [][]string{
		{"x" + end + "y"},
		{"abc", end},
		{"a", end[:1], end[1:]},
		{end[:10], end[10:20], end[20:]},
		strings.Split("k8s.io/"+end, ""),
		{strings.Repeat("k8s.io/initial-events-en", 9), "k8s.io/initial-events-e", "nd"},
	} {
		var e pipeline.InitialEvents
		for i, p := range pieces {
			require.Equal(t, i == len(pieces)-1, e.Passed([]byte(p)), "%q %d", pieces, i)
		}
	}
}

func TestUpgradesOutliveDrainingUntilTheyAreCut(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{then: echo})
	m.policy(nil)
	u := m.upgrade("/api/v1/namespaces/a/pods/b/exec", "websocket", "")
	require.Equal(t, 101, u.resp.StatusCode)
	ctx, cancel := context.WithCancel(t.Context())
	drained := make(chan error)
	go func() { drained <- m.pod.Drain(ctx) }()
	<-m.pod.env.Draining.Done()
	_, err := io.WriteString(u.conn, "ping")
	require.NoError(t, err)
	b := make([]byte, len("helloping"))
	_, err = io.ReadFull(u.br, b)
	require.NoError(t, err)
	require.Equal(t, "helloping", string(b))
	cancel()
	require.ErrorIs(t, <-drained, context.Canceled)
	_, err = u.br.ReadByte()
	require.Error(t, err)
}

// On HTTP/1.1 the header says it, and the connection serves until then, however long
// nothing was asked.
func TestAnswersWhileDraining(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	m.policy(nil)
	conn, err := tls.Dial("tcp", m.addr, &tls.Config{InsecureSkipVerify: true})
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(soon)))
	br := bufio.NewReader(conn)
	get := func() *http.Response {
		_, err := io.WriteString(conn, "GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		resp, err := http.ReadResponse(br, nil)
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp
	}
	require.False(t, get().Close)
	drained := make(chan error)
	go func() { drained <- m.pod.Drain(t.Context()) }()
	<-m.pod.env.Draining.Done()
	time.Sleep(3 * time.Second)
	resp := get()
	require.Equal(t, 200, resp.StatusCode)
	require.True(t, resp.Close)
	_, err = br.ReadByte()
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, <-drained)
	require.NoError(t, m.pod.Serve(closedListener{}), "draining: nothing to serve")
}

type closedListener struct{ net.Listener }

func (closedListener) Close() error              { return nil }
func (closedListener) Accept() (net.Conn, error) { return nil, net.ErrClosed }
