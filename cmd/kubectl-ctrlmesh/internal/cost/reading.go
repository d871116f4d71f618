package cost

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Reading is what agents have counted until one time.
type Reading struct {
	At time.Time
	// Agents are the counts of agents, by name of the pod. An agent that is replaced counts from zero.
	Agents map[string]Counts
}

// Counts are those of one agent, by what is counted.
type Counts map[subject]count

// subject is whose requests are counted, and for which resource; an empty one has what is not counted by resource.
type subject struct{ namespace, workload, shard, resource string }

// count is a sum since the agent started, apart from watches, which are those that are open.
type count struct {
	requests, writes, conflicts, throttled, bytes, apiserver float64
	// added is the time that requests spent in the proxy, in seconds, and timed their number.
	added, timed float64
	watches      float64
}

// Parse reads the metrics of an agent, in the text format of Prometheus.
func Parse(text io.Reader) (Counts, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(text)
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of an agent: %w", err)
	}
	out := Counts{}
	for name, add := range adders {
		for _, m := range families[name].GetMetric() {
			label := func(name string) string {
				i := slices.IndexFunc(m.Label, func(l *dto.LabelPair) bool { return l.GetName() == name })
				if i < 0 {
					return ""
				}
				return m.Label[i].GetValue()
			}
			of := subject{label("namespace"), label("workload"), label("shard"), label("resource")}
			c := out[of]
			add(&c, m, label)
			out[of] = c
		}
	}
	return out, nil
}

// adders add a series of an agent to a count, by the name of the metric.
var adders = map[string]func(c *count, m *dto.Metric, label func(string) string){
	"ctrlmesh_requests_total": func(c *count, m *dto.Metric, label func(string) string) {
		n := m.GetCounter().GetValue()
		c.requests += n
		if slices.Contains(writes, label("verb")) {
			c.writes += n
		}
		switch label("code") {
		case "409":
			c.conflicts += n
		case "429":
			c.throttled += n
		}
	},
	"ctrlmesh_response_bytes_total": func(c *count, m *dto.Metric, _ func(string) string) { c.bytes += m.GetCounter().GetValue() },
	"ctrlmesh_apiserver_seconds_total": func(c *count, m *dto.Metric, _ func(string) string) {
		c.apiserver += m.GetCounter().GetValue()
	},
	"ctrlmesh_watches": func(c *count, m *dto.Metric, _ func(string) string) { c.watches += m.GetGauge().GetValue() },
	"ctrlmesh_added_latency_seconds": func(c *count, m *dto.Metric, _ func(string) string) {
		c.added += m.GetHistogram().GetSampleSum()
		c.timed += float64(m.GetHistogram().GetSampleCount())
	},
}

// writes are the verbs that change objects.
var writes = strings.Fields("create update patch delete deletecollection")

// since returns what was counted after an earlier count of the same agent. The earlier one is the zero value if
// the agent, or the series, is new. A series that went back began anew.
func (c count) since(before count) count {
	if c.requests < before.requests || c.bytes < before.bytes || c.timed < before.timed {
		return c
	}
	return count{
		c.requests - before.requests, c.writes - before.writes, c.conflicts - before.conflicts, c.throttled - before.throttled,
		c.bytes - before.bytes, c.apiserver - before.apiserver, c.added - before.added, c.timed - before.timed, c.watches,
	}
}

func (c count) plus(d count) count {
	return count{
		c.requests + d.requests, c.writes + d.writes, c.conflicts + d.conflicts, c.throttled + d.throttled,
		c.bytes + d.bytes, c.apiserver + d.apiserver, c.added + d.added, c.timed + d.timed, c.watches + d.watches,
	}
}
