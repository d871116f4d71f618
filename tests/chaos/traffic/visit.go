package traffic

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// visit is a line of `probe visit`, or of the `probe host` that received the request.
type visit struct {
	ID    string
	Sent  time.Time
	Kind  string `json:"visit"`
	Host  string
	Code  int
	Error string
}

// answered reports whether the host responded.
func (v visit) answered() bool { return v.Code == http.StatusOK && v.Error == "" }

// refused reports whether the mesh refused the request by a rule.
func (v visit) refused() bool {
	return v.Code != 0 && v.Code != http.StatusOK || strings.Contains(v.Error, "access denied")
}

func (v visit) String() string {
	return fmt.Sprintf("%s %s %s: %d %s", v.Sent.Format("15:04:05.000"), v.Kind, v.Host, v.Code, v.Error)
}

// visitLog has the visits of a pod that sends or receives them.
type visitLog struct {
	log harness.Follower
	all []visit
}

// read returns the visits so far.
func (l *visitLog) read() ([]visit, error) {
	err := l.log.Read(func(text []byte) error {
		l.all = append(l.all, parseVisits(text)...)
		return nil
	})
	return l.all, err
}

// parseVisits parses whole lines of a container's log file.
func parseVisits(text []byte) (out []visit) {
	for line := range bytes.Lines(text) {
		parts := bytes.SplitN(line, []byte(" "), 4) // time, stream, tag
		var v visit
		if len(parts) == 4 && json.Unmarshal(parts[3], &v) == nil && v.Kind != "" {
			out = append(out, v)
		}
	}
	return out
}

// window is a time in which a host is denied.
type window struct{ from, to time.Time }

// leakedIn returns the visits of a host that were sent while it was denied.
func leakedIn(asked []visit, denied []window) (out []visit) {
	for _, v := range asked {
		for _, d := range denied {
			if v.Sent.After(d.from) && v.Sent.Before(d.to) {
				out = append(out, v)
			}
		}
	}
	return out
}
