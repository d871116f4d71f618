package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// beat is a line of `probe pulse`: one request and what became of it.
type beat struct {
	ID         string
	Start      time.Time
	MS         float64
	Kind       string
	Code       int
	Error      string
	Issuers    []string // of whom it was sent to
	Namespaces []string
}

// change is another: something that its informer was told.
type change struct {
	Time    time.Time
	Object  string
	Version string
}

const (
	freshKind = "fresh" // on a connection of its own
	writeKind = "write"
	// meshIssuer is in the name of who signs the mesh's certificates, and of nobody else.
	meshIssuer = "O=ctrlmesh"
)

func (b beat) end() time.Time {
	return b.Start.Add(time.Duration(b.MS * float64(time.Millisecond)))
}

// good says whether the request was answered.
func (b beat) good() bool { return b.Error == "" && b.Code < 400 }

// direct says whether the request was sent to the apiserver itself.
func (b beat) direct() bool {
	return slices.ContainsFunc(b.Issuers, func(issuer string) bool { return !strings.Contains(issuer, meshIssuer) })
}

func (b beat) meshed() bool { return b.good() && !b.direct() }

// wide says whether an answer had more in it than the namespace of the shard.
func (b beat) wide(owns string) bool {
	return slices.ContainsFunc(b.Namespaces, func(ns string) bool { return ns != owns })
}

func (b beat) String() string {
	return fmt.Sprintf("%s %s %.0f ms: %d %s, to %q, saw %v", b.Start.Format("15:04:05.000"), b.Kind, b.MS, b.Code, b.Error, b.Issuers, b.Namespaces)
}

// parsePulse reads whole lines of a container's log file.
func parsePulse(text []byte) (beats []beat, changes []change) {
	for line := range bytes.Lines(text) {
		parts := bytes.SplitN(line, []byte(" "), 4) // time, stream, tag
		if len(parts) < 4 {
			continue
		}
		var l struct {
			beat
			change
		}
		if json.Unmarshal(parts[3], &l) != nil {
			continue // whatever a program prints when it dies
		}
		switch {
		case l.Kind != "":
			beats = append(beats, l.beat)
		case l.Object != "":
			changes = append(changes, l.change)
		}
	}
	return beats, changes
}

// stretch are the beats that began in [from, to), by when they ended.
func stretch(all []beat, from, to time.Time) []beat {
	var out []beat
	for _, b := range all {
		if !b.Start.Before(from) && b.Start.Before(to) {
			out = append(out, b)
		}
	}
	slices.SortStableFunc(out, func(a, b beat) int { return a.end().Compare(b.end()) })
	return out
}

// first is the first to end of the wanted beats that ended after a time; false if there is none.
func first(all []beat, after time.Time, wanted func(beat) bool) (found beat, ok bool) {
	for _, b := range all {
		if b.end().After(after) && wanted(b) && (!ok || b.end().Before(found.end())) {
			found, ok = b, true
		}
	}
	return found, ok
}

// count those that are so, and tell of the first.
func count(all []beat, is func(beat) bool) (n int, example string) {
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
