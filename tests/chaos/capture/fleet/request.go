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
func (r Request) End() time.Time {
	return r.Start.Add(time.Duration(r.MS * float64(time.Millisecond)))
}

// OK reports whether the request succeeded.
func (r Request) OK() bool { return r.Error == "" && r.Code < 400 }

// Direct reports whether the request was sent to the apiserver itself.
func (r Request) Direct() bool {
	return slices.ContainsFunc(r.Issuers, func(issuer string) bool { return !strings.Contains(issuer, meshIssuer) })
}

// ViaMesh reports whether the request succeeded through the mesh alone.
func (r Request) ViaMesh() bool { return r.OK() && !r.Direct() }

// Beyond reports whether the response had objects of other namespaces than the given one.
func (r Request) Beyond(owns string) bool {
	return slices.ContainsFunc(r.Namespaces, func(ns string) bool { return ns != owns })
}

func (r Request) String() string {
	return fmt.Sprintf("%s %s %.0f ms: %d %s, to %q, saw %v", r.Start.Format("15:04:05.000"), r.Kind, r.MS, r.Code, r.Error, r.Issuers, r.Namespaces)
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
	out := slices.DeleteFunc(slices.Clone(all), func(r Request) bool { return r.Start.Before(from) || !r.Start.Before(to) })
	slices.SortStableFunc(out, func(a, b Request) int { return a.End().Compare(b.End()) })
	return out
}

// First returns the wanted request that ended first after a time. It returns false if there is
// none.
func First(all []Request, after time.Time, wanted func(Request) bool) (found Request, ok bool) {
	for _, r := range all {
		if r.End().After(after) && wanted(r) && (!ok || r.End().Before(found.End())) {
			found, ok = r, true
		}
	}
	return found, ok
}

// count returns how many requests match, and the first of them as an example.
func count(all []Request, is func(Request) bool) (n int, example string) {
	for _, r := range all {
		if is(r) {
			if n == 0 {
				example = r.String()
			}
			n++
		}
	}
	return n, example
}
