package filter

import (
	"bytes"
	"io"
)

// Event is one event of a watch.
type Event struct {
	// Bytes are the event as it came, without the spaces around it. All slices are valid
	// until the next event is read.
	Bytes []byte
	// Kind is ADDED, MODIFIED, DELETED, BOOKMARK, ERROR or an unknown kind.
	Kind []byte
	// Key is the key of the object, if One is true: the event is about a single object.
	Key Key
	One bool
	// Revision is the object's resourceVersion; nil if it has none, or more than one.
	Revision []byte
	// Head means that the event contains the columns of a Table, which later ones omit.
	Head bool
}

// OfTheStream reports whether the event is about the watch itself, not about an object.
func (e *Event) OfTheStream() bool { return ofTheStream(e.Kind) }

// Events reads a watch event by event, in the encodings that New supports.
type Events struct {
	in       input
	protobuf bool
}

// NewEvents returns the Events of src. It ignores the options for lists.
func NewEvents(src io.Reader, o Options) (*Events, error) {
	o.Watch = true
	in, media, err := newInput(src, o)
	if err != nil {
		return nil, err
	}
	in.wait = true
	return &Events{in: in, protobuf: media == typeProtobuf}, nil
}

// Protobuf reports whether the events are in protobuf. Else they are in JSON.
func (e *Events) Protobuf() bool { return e.protobuf }

// Next reads one event. After an error, Rest returns what was not returned as an event.
func (e *Events) Next() (Event, error) {
	e.in.await()
	if e.protobuf {
		return e.nextProto()
	}
	return e.nextJSON()
}

// Rest returns the bytes that were read but not returned as an event, and the rest of the
// source.
func (e *Events) Rest() io.Reader {
	read := bytes.NewReader(e.in.take(len(e.in.b)))
	if e.in.err != nil {
		return io.MultiReader(read, failing{e.in.err})
	}
	return io.MultiReader(read, e.in.src)
}

// Ended returns the error that ended the source, or nil if it may continue.
func (e *Events) Ended() error { return e.in.err }

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func (e *Events) nextJSON() (Event, error) {
	for {
		out, err := e.in.spaces()
		if err != nil {
			return Event{}, err
		}
		if len(out) == 0 {
			break
		}
	}
	s := scanner{in: &e.in}
	kind, seen, o := s.event()
	out := Event{Kind: s.text(kind)}
	switch {
	case !seen.set || seen.from < 0:
		if !out.OfTheStream() {
			s.fail()
		}
	case out.OfTheStream():
		out.Revision = s.text(o.revision)
	default:
		n := 0
		table := s.each(o, func(o object) {
			out.Key, out.Revision = s.keyOf(o), s.text(o.revision)
			n++
		})
		if out.One = n == 1; !out.One {
			out.Key, out.Revision = Key{}, nil
		}
		out.Head = table && o.columns.set && string(e.in.b[o.columns.from:o.columns.to]) != "null"
	}
	if s.err != nil {
		return Event{}, s.err
	}
	out.Bytes = e.in.take(s.i)
	return out, nil
}

func (e *Events) nextProto() (Event, error) {
	size, kind, object, err := e.in.event()
	if err != nil {
		return Event{}, err
	}
	out := Event{Kind: kind}
	if !out.OfTheStream() {
		if out.Key, err = protoKey(object); err != nil {
			return Event{}, err
		}
		out.One = true
	}
	if string(kind) != "ERROR" {
		if out.Revision, err = protoRevision(object); err != nil {
			return Event{}, err
		}
	}
	out.Bytes = e.in.take(size)
	return out, nil
}
