package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Request is a line of `probe pulse`: a request of a member and its response.
type Request struct {
	ID         string
	Start      time.Time
	MS         float64
	Kind       string
	Code       int
	Error      string
	Issuers    []string // of the certificates of the servers that it was sent to
	Namespaces []string
}

// event is another line of `probe pulse`: an event that its informer received.
type event struct {
	Time    time.Time
	Object  string
	Version string
}

// FreshKind is the kind of a request on a new connection.
const FreshKind = "fresh"

const (
	writeKind = "write"
	// meshIssuer is in the issuer of all certificates of the mesh, and of no others.
	meshIssuer = "O=ctrlmesh"
)

// End returns when the response ended.
func (b Request) End() time.Time {
	return b.Start.Add(time.Duration(b.MS * float64(time.Millisecond)))
}

// OK reports whether the request succeeded.
func (b Request) OK() bool { return b.Error == "" && b.Code < 400 }

// Direct reports whether the request was sent to the apiserver itself.
func (b Request) Direct() bool {
	return slices.ContainsFunc(b.Issuers, func(issuer string) bool { return !strings.Contains(issuer, meshIssuer) })
}

// ViaMesh reports whether the request succeeded through the mesh alone.
func (b Request) ViaMesh() bool { return b.OK() && !b.Direct() }

// Beyond reports whether the response had objects of other namespaces than the given one.
func (b Request) Beyond(owns string) bool {
	return slices.ContainsFunc(b.Namespaces, func(ns string) bool { return ns != owns })
}

func (b Request) String() string {
	return fmt.Sprintf("%s %s %.0f ms: %d %s, to %q, saw %v", b.Start.Format("15:04:05.000"), b.Kind, b.MS, b.Code, b.Error, b.Issuers, b.Namespaces)
}

// parsePulse parses whole lines of a container's log file.
func parsePulse(text []byte) (requests []Request, events []event) {
	for line := range bytes.Lines(text) {
		parts := bytes.SplitN(line, []byte(" "), 4) // time, stream, tag
		if len(parts) < 4 {
			continue
		}
		var l struct {
			Request
			event
		}
		if json.Unmarshal(parts[3], &l) != nil {
			continue // such as a panic
		}
		switch {
		case l.Kind != "":
			requests = append(requests, l.Request)
		case l.Object != "":
			events = append(events, l.event)
		}
	}
	return requests, events
}

// Between returns the requests that began in [from, to), in the order in which they ended.
func Between(all []Request, from, to time.Time) []Request {
	var out []Request
	for _, b := range all {
		if !b.Start.Before(from) && b.Start.Before(to) {
			out = append(out, b)
		}
	}
	slices.SortStableFunc(out, func(a, b Request) int { return a.End().Compare(b.End()) })
	return out
}

// First returns the wanted request that ended first after a time. It returns false if there is
// none.
func First(all []Request, after time.Time, wanted func(Request) bool) (found Request, ok bool) {
	for _, b := range all {
		if b.End().After(after) && wanted(b) && (!ok || b.End().Before(found.End())) {
			found, ok = b, true
		}
	}
	return found, ok
}

// Count returns how many requests match, and the first of them as an example.
func Count(all []Request, is func(Request) bool) (n int, example string) {
	for _, b := range all {
		if is(b) {
			if n == 0 {
				example = b.String()
			}
			n++
		}
	}
	return n, example
}
