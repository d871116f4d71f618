package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/sync/errgroup"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
)

const watchPath = "/api/v1/configmaps?watch=true&resourceVersion=0"

// signalled answers watches with an event of namespace ns-0 once it gets a signal.
func signalled(signal <-chan struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			return
		}
		w.Header().Set("Content-Type", jsonType)
		w.(http.Flusher).Flush()
		select {
		case <-signal:
			_, _ = w.Write(usualEvent)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case <-r.Context().Done():
		}
	}
}

// atOnce is how many watches are opened at the same time.
const atOnce = 8

// openWatches opens n watches, a few at a time as clients do that limit their rate.
func openWatches(t *testing.T, c *http.Client, n int) []*http.Response {
	t.Helper()
	opened := make([]*http.Response, n)
	var group errgroup.Group
	group.SetLimit(atOnce)
	for i := range opened {
		group.Go(func() error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://kubernetes.default.svc"+watchPath, nil)
			if err != nil {
				return err
			}
			resp, err := c.Do(r)
			if err != nil {
				return err
			}
			opened[i] = resp
			if resp.StatusCode != http.StatusOK {
				body, _ := io.ReadAll(resp.Body)
				return fmt.Errorf("watch %d: %s", i, body)
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	return opened
}

// readEvents reads the event of each watch.
func readEvents(t *testing.T, watches []*http.Response) {
	t.Helper()
	got := make([]byte, len(usualEvent))
	for _, w := range watches {
		_, err := io.ReadFull(w.Body, got)
		require.NoError(t, err)
		require.True(t, bytes.Equal(usualEvent, got))
	}
}

// Filtered watches take the most memory.
func TestFiveThousandWatchesOfOnePod(t *testing.T) {
	signal := make(chan struct{})
	m := newMesh(t, signalled(signal))
	m.policy(policytest.Divided(sharding.Keys("ns-0"), meshv1.Method_METHOD_FILTER))
	watches := openWatches(t, m.client(true), 5000)
	expected := int64(len(watches)) * (pipeline.StreamWeight + filter.WatchBuffer)
	// What a watch takes for its beginning is given back after its head is sent.
	require.Eventually(t, func() bool { return m.pod.budgets.Long.Taken() == expected }, soon, time.Millisecond)
	close(signal)
	readEvents(t, watches)
	require.Zero(t, testutil.CollectAndCount(m.server.metrics.Bounds), "no bound was reached")
}

// Watches of one pod that reach its bound do not affect those of a neighbour.
func TestWatchesAboveTheBudgetAreRefused(t *testing.T) {
	signal := make(chan struct{})
	s := newSiege(t, signalled(signal))
	long := &s.pod.budgets.Long
	const fit = 100
	// Of the pod's other watches, to be quick. A watch takes up to 4 KiB more while it begins.
	const others = pipeline.DefaultWatchMemory - fit*pipeline.StreamWeight - atOnce*4<<10
	require.True(t, long.Take(others))
	defer long.Give(others)
	c := s.client(true)
	watches := openWatches(t, c, fit)

	refused := s.with(c, "GET", watchPath, "")
	require.Equal(t, http.StatusTooManyRequests, refused.StatusCode)
	require.Equal(t, "1", refused.Header.Get("Retry-After"))
	require.Contains(t, refused.body, "184Mi")
	require.Contains(t, refused.body, "agent.watchMemory")
	require.EqualValues(t, 1, testutil.ToFloat64(s.server.metrics.Bounds.WithLabelValues("ns", "operator", "", "watches")))
	require.Equal(t, http.StatusOK, s.with(c, "GET", "/version", "").StatusCode, "watches leave short requests their own")

	require.NoError(t, watches[0].Body.Close())
	require.Eventually(t, func() bool { return long.Taken() < others+fit*pipeline.StreamWeight }, soon, time.Millisecond)
	watches = append(watches[1:], openWatches(t, c, 1)...)

	neighbours := openWatches(t, s.victim, 1000)
	close(signal)
	readEvents(t, watches)
	readEvents(t, neighbours)
}

// Watches of events without end, whose client reads nothing.
func TestHostileUnreadWatches(t *testing.T) {
	var sent atomic.Int64
	large := bytes.Replace(usualEvent, []byte("x"), bytes.Repeat([]byte("x"), 32<<10), 1)
	s := newSiege(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			_, _ = io.WriteString(w, "{}")
			return
		}
		w.Header().Set("Content-Type", jsonType)
		for r.Context().Err() == nil {
			n, _ := w.Write(large)
			sent.Add(int64(n))
		}
	}))
	const count = 400
	s.under("unread-watches", 64<<20, func() (func(), string) {
		f := s.frames()
		go func() { _, _ = f.end() }()
		require.NoError(t, f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
		for range count {
			_, err := f.ask("GET", watchPath, true)
			require.NoError(t, err)
		}
		require.NoError(t, f.w.Flush())
		var before int64
		require.Eventually(t, func() bool { // until the apiserver can send no more
			now := sent.Load()
			still := now == before && s.pod.budgets.Long.Taken() == count*pipeline.StreamWeight
			before = now
			return still
		}, soon, 500*time.Millisecond)
		lift := func() {
			_ = f.conn.Close()
			require.Eventually(t, func() bool { return s.held() == 0 }, soon, time.Millisecond)
			s.pod.inForce.clients.Load().main.Close() // idle ones are not of the watches
		}
		return lift, fmt.Sprintf("watches=%d sent_kib=%d charged_kib=%d", count, sent.Load()>>10, s.held()>>10)
	})
}
