package pipeline

import (
	"bytes"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

// narrowed is the state of a list or watch whose response is filtered.
type narrowed struct {
	Narrowing     methodNoter    // nil: it is not filtered
	ShardSelector string         // that was sent to the apiserver
	Objects       *filter.Reader // the response
	Mixed         atomic.Bool    // it had objects that could be foreign
	Unmarked      bool           // a watch begins with objects, and no event ends them
	Unselected    bool           // what a watch begins with had objects that were not selected
}

// methodNoter records how a list, or what a watch begins with, was narrowed.
type methodNoter interface{ NoteMethod(x *State) }

// NoteMethod records how the response was narrowed, once enough of it has passed.
func (x *State) NoteMethod() {
	if x.Narrowed.Narrowing != nil && x.Narrowed.Objects != nil {
		x.Narrowed.Narrowing.NoteMethod(x)
	}
}

// Resumption is the entry of a list or watch in the ledger.
type Resumption struct {
	Ticket  *relist.Ticket // nil: it has none
	Gap     *relist.Gap    // what faults keep from a watch's client
	Fills   bool           // the response fills an empty cache
	Initial *InitialEvents // not nil: a watch whose initial events have not ended
	Behind  bool           // a watch that begins with what its client's cache misses
	BegunAt atomic.Int64   // Unix nanoseconds since when a watch's client has all it began with
}

// Begun notes that the client of a stream has all that it began with, and if filled that
// its cache is complete.
func (r *Resumption) Begun(filled bool) {
	r.BegunAt.Store(time.Now().UnixNano())
	if r.Ticket != nil && filled {
		r.Ticket.Filled()
	}
}

// Leave removes the entry.
func (r *Resumption) Leave() {
	if r.Ticket != nil {
		r.Ticket.End(r.Gap)
		r.Ticket.Leave()
		r.Ticket = nil
	}
}

// StaleList is a list that a fault makes stale.
type StaleList struct {
	Version string // of the list that is requested, or empty
	Fresh   string // the query without it
	Seen    *relist.History
}

// EndOfInitial is the annotation of the bookmark after which a client that asked for
// initial events has a complete cache. A client whose watch ends earlier starts again.
var EndOfInitial = []byte("k8s.io/initial-events-end")

// InitialEvents looks for the end of the initial events in a watch.
type InitialEvents struct{ tail []byte }

// Passed reports whether the end was in the pieces of the watch up to p.
func (i *InitialEvents) Passed(p []byte) bool {
	overlap := len(EndOfInitial) - 1
	seam := append(i.tail, p[:min(len(p), overlap)]...)
	if bytes.Contains(p, EndOfInitial) || bytes.Contains(seam, EndOfInitial) {
		return true
	}
	if len(p) >= overlap {
		seam = p
	}
	i.tail = append(i.tail[:0], seam[max(0, len(seam)-overlap):]...)
	return false
}
