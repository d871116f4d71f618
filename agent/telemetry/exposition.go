package telemetry

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
)

// renderInterval is the shortest time between two renderings of the metrics. With
// endpointWriteTimeout it bounds how many of them slow readers keep.
const renderInterval = 500 * time.Millisecond

var textFormat = expfmt.NewFormat(expfmt.TypeTextPlain)

// exposition serves metrics in Prometheus's text format. All requests that arrive before
// a rendering begins share it: the rate of requests changes neither the cost of renderings
// nor how long others wait.
type exposition struct {
	gatherer prometheus.Gatherer
	turn     sync.Mutex // held while rendering
	last     time.Time  // when the last rendering began; under turn

	mu   sync.Mutex
	next *rendering // nil if nobody waits
}

func newExposition(g prometheus.Gatherer) *exposition { return &exposition{gatherer: g} }

// rendering is all metrics at one time.
type rendering struct {
	done   chan struct{}
	err    error
	text   []byte
	zipped func() []byte
}

// ServeHTTP implements http.Handler.
func (e *exposition) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	shared := e.join()
	select {
	case <-shared.done:
	case <-r.Context().Done():
		return
	}
	if shared.err != nil {
		http.Error(w, shared.err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", string(textFormat))
	body := shared.text
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		body = shared.zipped()
	}
	_, _ = w.Write(body)
}

// join returns the next rendering to begin.
func (e *exposition) join() *rendering {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == nil {
		e.next = &rendering{done: make(chan struct{})}
		go e.render(e.next)
	}
	return e.next
}

func (e *exposition) render(r *rendering) {
	defer close(r.done)
	e.turn.Lock()
	defer e.turn.Unlock()
	time.Sleep(time.Until(e.last.Add(renderInterval)))
	e.last = time.Now()
	e.mu.Lock()
	e.next = nil // those who ask from now on expect to see what changes from now on
	e.mu.Unlock()
	r.text, r.err = e.encode()
	r.zipped = sync.OnceValue(func() []byte { return zip(r.text) })
}

func (e *exposition) encode() ([]byte, error) {
	families, err := e.gatherer.Gather()
	if err != nil {
		return nil, fmt.Errorf("gathering metrics: %w", err)
	}
	var text bytes.Buffer
	encoder := expfmt.NewEncoder(&text, textFormat)
	for _, f := range families {
		if err := encoder.Encode(f); err != nil {
			return nil, fmt.Errorf("encoding metrics: %w", err)
		}
	}
	return text.Bytes(), nil
}

func zip(text []byte) []byte {
	var zipped bytes.Buffer
	w, _ := gzip.NewWriterLevel(&zipped, gzip.BestSpeed) // the level exists
	_, _ = w.Write(text)                                 // a buffer's writes do not fail
	_ = w.Close()
	return zipped.Bytes()
}
