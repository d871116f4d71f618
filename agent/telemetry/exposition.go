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
	"golang.org/x/sync/singleflight"
)

// renderInterval is the shortest time between two renderings of the metrics. With
// endpointWriteTimeout it bounds how many of them slow readers keep.
const renderInterval = 500 * time.Millisecond

var textFormat = expfmt.NewFormat(expfmt.TypeTextPlain)

// exposition serves metrics in Prometheus's text format. All requests that arrive before
// a rendering begins share it: the rate of requests changes neither the cost of renderings
// nor how long others wait.
type exposition struct {
	gatherer   prometheus.Gatherer
	renderings singleflight.Group
	turn       sync.Mutex // held while rendering
	last       time.Time  // when the last rendering began; under turn
}

// rendering is all metrics at one time.
type rendering struct {
	text   []byte
	zipped func() []byte
}

// ServeHTTP implements http.Handler.
func (e *exposition) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var shared singleflight.Result
	select {
	case shared = <-e.renderings.DoChan("", e.render):
	case <-r.Context().Done():
		return
	}
	if shared.Err != nil {
		http.Error(w, shared.Err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", string(textFormat))
	all := shared.Val.(rendering) // what render returns
	body := all.text
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		w.Header().Set("Content-Encoding", "gzip")
		body = all.zipped()
	}
	_, _ = w.Write(body)
}

// render waits for its turn and returns a rendering.
func (e *exposition) render() (any, error) {
	e.turn.Lock()
	defer e.turn.Unlock()
	time.Sleep(time.Until(e.last.Add(renderInterval)))
	e.last = time.Now()
	e.renderings.Forget("") // later requests expect later values
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
	return rendering{text.Bytes(), sync.OnceValue(func() []byte { return zip(text.Bytes()) })}, nil
}

func zip(text []byte) []byte {
	var zipped bytes.Buffer
	w, _ := gzip.NewWriterLevel(&zipped, gzip.BestSpeed) // the level exists
	_, _ = w.Write(text)                                 // a buffer's writes do not fail
	_ = w.Close()
	return zipped.Bytes()
}
