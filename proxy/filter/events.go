package filter

import (
	"bytes"
	"io"
)

// Event is one event of a watch.
type Event struct {
	// Bytes are all of it as it came, less the spaces around it. They and the others
	// are valid until the next event is read.
	Bytes []byte
	// Kind is ADDED, MODIFIED, DELETED, BOOKMARK, ERROR or what is unknown.
	Kind []byte
	// Key is the object's, if the event is of One.
	Key Key
	One bool
	// Revision is the object's resourceVersion; nil: it has none, or more than one.
	Revision []byte
	// Head: the event says what later ones leave out, the columns of a Table.
	Head bool
}

// OfTheStream reports whether the event is no object's but of the watch itself.
func (e *Event) OfTheStream() bool { return ofTheStream(e.Kind) }

// Events reads a watch event by event, in the forms that New filters.
type Events struct {
	in       input
	protobuf bool
}

// NewEvents reads what src gives. Of o, what is about lists is of no matter.
func NewEvents(src io.Reader, o Options) (*Events, error) {
	if o.MaxObject == 0 {
		o.MaxObject = DefaultMaxObject
	}
	media, err := mediaType(o.ContentType)
	if err != nil {
		return nil, err
	}
	in := input{src: src, max: o.MaxObject, hold: o.Hold, base: watchBuffer, asked: watchBuffer, wait: true}
	return &Events{in: in, protobuf: media == typeProtobuf}, nil
}

// Protobuf reports whether the events are, or else JSON.
func (e *Events) Protobuf() bool { return e.protobuf }

// Next reads one event. After an error Rest has all that no event was made of.
func (e *Events) Next() (Event, error) {
	if e.protobuf {
		return e.nextProto()
	}
	return e.nextJSON()
}

// Rest is all that no event was made of, and what follows it.
func (e *Events) Rest() io.Reader {
	read := bytes.NewReader(e.in.take(len(e.in.b)))
	if e.in.err != nil {
		return io.MultiReader(read, failing{e.in.err})
	}
	return io.MultiReader(read, e.in.src)
}

// Ended is why nothing more comes of the source; nil: more may.
func (e *Events) Ended() error { return e.in.err }

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func (e *Events) nextJSON() (Event, error) {
	for {
		e.in.take(spaces(e.in.b))
		if len(e.in.b) > 0 {
			break
		}
		if err := e.in.more(); err != nil {
			return Event{}, err
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
