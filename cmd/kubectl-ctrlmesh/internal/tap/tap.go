// Package tap reads the access lines in the log of an agent. Clients choose parts of these lines, so it
// bounds them, and escapes what a terminal would not print. It is pure.
package tap

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

const (
	// maxLine bounds a line in bytes. The lines of agents are shorter.
	maxLine = 64 << 10
	// maxText bounds what is printed of one field, in characters.
	maxText = 256
)

// Messages of access lines.
const (
	requestMessage = "request"
	streamMessage  = "stream begins"
	egressMessage  = "egress"
)

// Line is an access line of an agent: a request to the apiserver, or to another host.
type Line struct {
	Time    time.Time `json:"time"`
	Message string    `json:"msg"`
	// Pod is namespace/name.
	Pod         string `json:"pod"`
	Shard       string `json:"shard"`
	Verb        string `json:"verb"`
	Group       string `json:"group"`
	Resource    string `json:"resource"`
	Subresource string `json:"subresource"`
	Namespace   string `json:"namespace"`
	Name        string `json:"name"`
	Cluster     string `json:"cluster"`
	Code        int    `json:"code"`
	// Added is the latency that the agent added, in nanoseconds.
	Added int64 `json:"added"`
	Bytes int64 `json:"bytes"`
	Notes       // why the agent did something else than to forward the request
	Other       // of requests to other hosts
}

// Notes are the effects of rules on a request.
type Notes struct {
	DryRun       string   `json:"dry_run"`
	LimitedBy    string   `json:"limited_by"`
	Faults       []string `json:"faults"`
	FaultSkipped string   `json:"fault_skipped"`
}

// Other describes a request to another host than the apiserver.
type Other struct {
	Protocol string `json:"protocol"`
	Host     string `json:"host"`
	To       string `json:"to"`
	Verdict  string `json:"verdict"`
	Rule     string `json:"rule"`
	Error    string `json:"error"`
}

// Parse returns the access line in a line of a log. ok is false for other lines.
func Parse(text []byte) (l Line, ok bool) {
	if len(text) > maxLine || json.Unmarshal(text, &l) != nil || l.Pod == "" {
		return Line{}, false
	}
	return l, l.Message == requestMessage || l.Message == streamMessage || l.Message == egressMessage
}

// Begins reports whether the line is about the beginning of a watch, and not about its end.
func (l Line) Begins() bool { return l.Message == streamMessage }

// Target returns what the request is about: resource and subresource.
func (l Line) Target() string {
	if l.Subresource != "" {
		return l.Resource + "/" + l.Subresource
	}
	return l.Resource
}

// Object returns the namespace and the name of the object, as far as the request has them.
func (l Line) Object() string {
	if l.Name == "" {
		return l.Namespace
	}
	return strings.TrimPrefix(l.Namespace+"/"+l.Name, "/")
}

// String returns the line for people, without line breaks.
func (l Line) String() string {
	code := "-"
	if l.Code != 0 {
		code = strconv.Itoa(l.Code)
	}
	out := []string{l.Time.UTC().Format("15:04:05.000"), code}
	if l.Message == egressMessage {
		out = append(out, l.Protocol, l.Host, l.To, l.Verdict)
	} else {
		out = append(out, l.Verb, l.Target(), l.Object())
	}
	for i := range out {
		out[i] = Escape(out[i])
		if out[i] == "" {
			out[i] = "-"
		}
	}
	return strings.Join(append(out, l.details()...), " ")
}

// details returns the rest of the line, as key=value.
func (l Line) details() (out []string) {
	out = pair(out, "cluster", l.Cluster)
	out = pair(out, "shard", l.Shard)
	if l.Message == requestMessage {
		out = pair(out, "added", time.Duration(l.Added).String())
		out = pair(out, "bytes", strconv.FormatInt(l.Bytes, 10))
	}
	return append(out, l.RuleActions()...)
}

// pair appends key=value, unless the value is empty.
func pair(to []string, key, value string) []string {
	if value == "" {
		return to
	}
	return append(to, key+"="+Escape(value))
}

// RuleActions returns what rules did to the request, as key=value.
func (l Line) RuleActions() (out []string) {
	add := func(key, value string) { out = pair(out, key, value) }
	add("limited_by", l.LimitedBy)
	add("faults", strings.Join(l.Faults, ","))
	add("fault_skipped", l.FaultSkipped)
	add("dry_run", l.DryRun)
	add("rule", l.Rule)
	add("error", l.Error)
	if l.Message == streamMessage {
		out = append(out, "(stream begins)")
	}
	return out
}

// Escape returns a text for a terminal: what is not printable is escaped as in Go, and what is long is cut.
func Escape(text string) string {
	var b strings.Builder
	n := 0
	for _, r := range text {
		if n++; n > maxText {
			b.WriteString("...")
			break
		}
		if unicode.IsPrint(r) {
			b.WriteRune(r)
			continue
		}
		quoted := strconv.QuoteRuneToASCII(r)
		b.WriteString(quoted[1 : len(quoted)-1])
	}
	return b.String()
}

// Raw returns a line of JSON for a terminal: the same values, with escapes for what is not printable.
func Raw(text []byte) (string, error) {
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return "", err
	}
	var b strings.Builder
	for _, r := range compact.String() {
		switch {
		case unicode.IsPrint(r):
			b.WriteRune(r)
		case r > 0xffff:
			r -= 0x10000
			fmt.Fprintf(&b, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String(), nil
}

// Filter selects access lines. An empty list selects all.
type Filter struct {
	// Pod is namespace/name.
	Pod   string
	Verbs []string
	// Resources are such as pods, which includes its subresources, or pods/status.
	Resources []string
	// Codes are such as 409 or 4xx.
	Codes []string
}

// verbs are those of access lines: of resources, and of HTTP for other paths.
var verbs = []string{
	"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "connect", "proxy", "post", "put", "head", "options",
}

// Check returns an error for verbs and codes that no line can have.
func (f Filter) Check() error {
	for _, v := range f.Verbs {
		if !slices.Contains(verbs, v) {
			return fmt.Errorf("unknown verb %q: the verbs are %s", v, strings.Join(verbs, ", "))
		}
	}
	for _, c := range f.Codes {
		n, err := strconv.Atoi(strings.ReplaceAll(c, "xx", "00"))
		if err != nil || len(c) != 3 || n < 100 || n > 599 {
			return fmt.Errorf("invalid code %q: write a status such as 409, or a class such as 4xx", c)
		}
	}
	return nil
}

// Selects reports whether the filter selects a line.
func (f Filter) Selects(l Line) bool {
	code := strconv.Itoa(l.Code)
	return l.Pod == f.Pod &&
		(len(f.Verbs) == 0 || slices.Contains(f.Verbs, l.Verb)) &&
		(len(f.Resources) == 0 || slices.Contains(f.Resources, l.Resource) || slices.Contains(f.Resources, l.Target())) &&
		(len(f.Codes) == 0 || slices.Contains(f.Codes, code) || slices.Contains(f.Codes, code[:1]+"xx"))
}

// Lines calls use for each line of a log, without its end. It skips lines that are too long.
func Lines(log io.Reader, use func([]byte) error) error {
	r := bufio.NewReaderSize(log, maxLine)
	for long := false; ; {
		text, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			long = true
			continue
		}
		if text = bytes.TrimRight(text, "\r\n"); len(text) > 0 && !long {
			if err := use(text); err != nil {
				return err
			}
		}
		if long = false; errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
