package audit

import (
	"bytes"
	"encoding/json"
	"io"
	"time"
)

// Access is one line of an agent about a request. For a stream the agent writes two lines:
// before it sends the request, without a code, and when the answer begins.
type Access struct {
	ID       string    `json:"audit_id"`
	Time     time.Time `json:"time"`
	Pod      string    `json:"pod"`
	UID      string    `json:"uid"`
	Verb     string    `json:"verb"`
	Resource string    `json:"resource"`
	Code     int       `json:"code"`
}

// The msg of access lines.
const (
	accessMessage = "request"
	streamMessage = "stream begins"
)

// AccessLines reads an agent's log and returns its access lines: JSON objects with
// one of their messages and an audit id. It skips anything else, such as the output of a
// crash. Lines may have the prefix of container runtimes' log files.
func AccessLines(log io.Reader) ([]Access, error) {
	var (
		out     []Access
		partial []byte // of a line that the runtime split
	)
	err := eachLine(log, func(_ int, line []byte) error {
		content, whole := stripCRI(line)
		if !whole {
			partial = append(partial, content...)
			return nil
		}
		if len(partial) > 0 {
			content = append(partial, content...)
			partial = nil
		}
		var a struct {
			Msg string `json:"msg"`
			Access
		}
		if json.Unmarshal(content, &a) == nil && (a.Msg == accessMessage || a.Msg == streamMessage) && a.ID != "" {
			out = append(out, a.Access)
		}
		return nil
	})
	return out, err
}

// stripCRI removes `<time> <stream> <tag> ` from a line of a container's log file. The
// tag is F, or P when the line continues in the next one. A line without such a
// prefix is complete.
func stripCRI(line []byte) (content []byte, whole bool) {
	parts := bytes.SplitN(line, []byte(" "), 4)
	if len(parts) < 4 || string(parts[1]) != "stdout" && string(parts[1]) != "stderr" {
		return line, true
	}
	tag, _, _ := bytes.Cut(parts[2], []byte(":")) // more tags may follow
	return parts[3], string(tag) != "P"
}
