package proxy

import (
	"bytes"
	"sync/atomic"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
	"github.com/ctrlmesh/ctrlmesh/proxy/relist"
)

// narrowed is the state of a list or watch whose response is filtered.
type narrowed struct {
	narrowing     methodNoter    // nil: it is not filtered
	shardSelector string         // that was sent to the apiserver
	objects       *filter.Reader // the response
	judged        atomic.Bool    // it had objects that could be foreign
}

// methodNoter records how a list, or the initial events of a watch, were narrowed.
type methodNoter interface{ noteMethod(x *state) }

// noteMethod records how the response was narrowed, once enough of it has passed.
func (x *state) noteMethod() {
	if x.narrowing != nil && x.objects != nil {
		x.narrowing.noteMethod(x)
	}
}

// resumption is the entry of a list or watch in the ledger.
type resumption struct {
	ticket  *relist.Ticket // nil: it has none
	gap     *relist.Gap    // what faults keep from a watch's client
	fills   bool           // the response fills an empty cache
	initial *initialEvents // not nil: a watch whose initial events have not ended
	settled atomic.Int64   // Unix nanoseconds since when a watch's client has all it began with
}

// leave removes the entry.
func (r *resumption) leave() {
	if r.ticket != nil {
		r.ticket.End(r.gap)
		r.ticket.Leave()
		r.ticket = nil
	}
}

// staleList is a list that a fault makes stale.
type staleList struct {
	version string // of the list that is requested, or empty
	fresh   string // the query without it
	seen    *relist.History
}

// endOfInitial is the annotation of the bookmark after which a client that asked for
// initial events has a complete cache. A client whose watch ends earlier starts again.
var endOfInitial = []byte("k8s.io/initial-events-end")

// initialEvents looks for the end of the initial events in a watch.
type initialEvents struct{ tail []byte }

// passed reports whether the end was in the pieces of the watch up to p.
func (i *initialEvents) passed(p []byte) bool {
	overlap := len(endOfInitial) - 1
	seam := append(i.tail, p[:min(len(p), overlap)]...)
	if bytes.Contains(p, endOfInitial) || bytes.Contains(seam, endOfInitial) {
		return true
	}
	if len(p) >= overlap {
		seam = p
	}
	i.tail = append(i.tail[:0], seam[max(0, len(seam)-overlap):]...)
	return false
}
