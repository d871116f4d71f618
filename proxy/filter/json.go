package filter

import (
	"bytes"
	"fmt"
	"slices"
)

// jsonList is a list or a Table. What is around its array of items passes unchanged. What
// is before the array stays in memory until the array begins, because there may be none.
type jsonList struct {
	selector string

	at                place
	items, rows, kind span
	status            bool // the kind is Status
	// Of the current array: it has rows, no element was read yet, an element was kept.
	table, first, kept bool
}

type place int

const (
	before place = iota
	within       // an array of items or rows
	behind       // after such an array
	done         // only spaces may follow
)

func (l *jsonList) next(r *Reader) ([]byte, error) {
	switch l.at {
	case within:
		return l.element(r)
	case done:
		return trailer(&r.in)
	}
	return l.around(r)
}

// around reads up to the next array of items or rows, or the end of the list.
func (l *jsonList) around(r *Reader) ([]byte, error) {
	s := scanner{in: &r.in}
	to := *l // a copy, so that l is unchanged on errWait
	var metadata span
	another := false
	if to.at == before {
		s.expect('{')
		if another = s.peek() != '}'; !another {
			s.i++
		}
	} else {
		another = s.another('}')
	}
	for another && s.err == nil {
		switch key := s.key(); string(key) {
		case "items", "rows":
			if to.begin(&s, string(key)) {
				return to.commit(l, &s, r)
			}
		case "metadata":
			s.once(&metadata)
			if !s.echoes(l.selector) {
				break
			}
			if r.echoed = true; l.at == before {
				r.plain = true
				return r.in.take(len(r.in.b)), nil
			}
		case "kind":
			s.stringOrNull(&to.kind)
			to.status = string(s.text(to.kind)) == "Status"
		default:
			s.skip()
		}
		another = s.another('}')
	}
	if !to.items.set && !to.rows.set && !to.status {
		s.fail()
	}
	to.at = done
	return to.commit(l, &s, r)
}

// begin reports whether an array of items or rows begins. Else the member is null.
func (l *jsonList) begin(s *scanner, key string) bool {
	l.at, l.table, l.first, l.kept = within, key == "rows", true, false
	place := &l.items
	if l.table {
		place = &l.rows
	}
	s.once(place)
	if s.peek() != '[' {
		s.null()
		return false
	}
	s.i++
	return true
}

// commit stores l in to, unless the scanner failed, and takes what was scanned.
func (l *jsonList) commit(to *jsonList, s *scanner, r *Reader) ([]byte, error) {
	if s.err == nil {
		*to = *l
	}
	return s.taken(r)
}

// element reads one element of an array, or its end.
func (l *jsonList) element(r *Reader) ([]byte, error) {
	s := scanner{in: &r.in}
	next := s.peek()
	switch {
	case next == ']':
		s.i++
		l.at = behind
		return s.taken(r)
	case !l.first:
		s.expect(',')
	}
	from := s.i
	read := s.object
	if l.table {
		read = s.row
	}
	k := s.keyOf(read())
	if s.err != nil {
		return nil, s.err
	}
	wasFirst := l.first
	l.first = false
	keep := r.decide(k)
	out := r.in.take(s.i)
	switch {
	case !keep:
		return nil, nil
	case !l.kept && !wasFirst:
		out = out[from:] // without the comma before the first element
	}
	l.kept = true
	return out, nil
}

// echoes walks over the metadata of a list and reports whether it echoes a selector.
func (s *scanner) echoes(selector string) bool {
	if s.peek() == 'n' {
		s.null()
		return false
	}
	var shard, echo span
	s.members(func(key []byte) {
		if string(key) != "shardInfo" || s.peek() != '{' {
			s.skip()
			return
		}
		s.once(&shard)
		s.members(func(key []byte) {
			if string(key) != "selector" {
				s.skip()
				return
			}
			s.stringOrNull(&echo)
		})
	})
	return selector != "" && string(s.text(echo)) == selector && s.err == nil
}

// taken takes from the input what was walked over.
func (s *scanner) taken(r *Reader) ([]byte, error) {
	if s.err != nil {
		return nil, s.err
	}
	return r.in.take(s.i), nil
}

// trailer passes spaces, and fails on anything else.
func trailer(in *input) ([]byte, error) {
	out, err := in.spaces()
	if err == nil && len(out) == 0 {
		err = ErrForm
	}
	return out, err
}

// spaces takes the spaces at the start of the input.
func (in *input) spaces() ([]byte, error) {
	if len(in.b) == 0 {
		if err := in.more(); err != nil {
			return nil, err
		}
	}
	return in.take(spaces(in.b)), nil
}

// jsonWatch is a stream of events.
type jsonWatch struct {
	dropped bool // the last event was dropped, and so are the spaces after it
	// columns are the columns of a Table. Only the first event has them, and they are
	// moved to the first one that is kept. sent is true once that event has passed.
	columns []byte
	sent    bool
}

func (w *jsonWatch) next(r *Reader) ([]byte, error) {
	// Spaces belong to the event before them, and pass at once: some clients read lines.
	if out, err := r.in.spaces(); err != nil || len(out) > 0 {
		if w.dropped {
			out = nil
		}
		return out, err
	}
	s := scanner{in: &r.in}
	kind, seen, o := s.event()
	kept, dropped, table := 0, 0, false
	if !ofTheStream(s.text(kind)) {
		if !seen.set || seen.from < 0 {
			s.fail()
		}
		table = s.eachKey(o, func(k Key) {
			if r.decide(k) {
				kept++
			} else {
				dropped++
			}
		})
	}
	if kept > 0 && dropped > 0 {
		s.fail() // part of an event cannot be dropped
	}
	out, err := s.taken(r)
	if err == nil && table && !w.sent {
		out, err = w.carry(r, out, o.columns, dropped == 0)
	}
	if w.dropped = dropped > 0; w.dropped {
		return nil, err
	}
	return out, err
}

// event walks over an event. seen is the place of its object, before the input if the
// object is null.
func (s *scanner) event() (kind, seen span, o object) {
	s.members(func(key []byte) {
		switch string(key) {
		case "type":
			s.stringOrNull(&kind)
		case "object":
			if s.once(&seen); s.peek() == 'n' {
				s.null()
				seen.from = -1
				return
			}
			o = s.object()
		default:
			s.skip()
		}
	})
	return kind, seen, o
}

// carry moves the columns from the first event to the first one that is kept.
func (w *jsonWatch) carry(r *Reader, event []byte, at span, kept bool) ([]byte, error) {
	said := event[at.from:at.to]
	some := at.set && string(said) != "null"
	switch {
	case kept:
		w.sent = true
		if at.set && !some && w.columns != nil {
			event = slices.Concat(event[:at.from], w.columns, event[at.to:])
		}
		w.columns = nil
	case some && w.columns == nil:
		if err := r.in.hold(len(said)); err != nil {
			return nil, err
		}
		w.columns = bytes.Clone(said)
	}
	return event, nil
}

// ofTheStream reports whether an event is about the watch itself, not about an object.
func ofTheStream(kind []byte) bool {
	return string(kind) == "BOOKMARK" || string(kind) == "ERROR"
}

// jsonKey reads the key of one object, or of a Table with one row.
func jsonKey(body []byte) (key Key, err error) {
	s := scanner{in: &input{b: body, err: errEnd}}
	n := 0
	s.eachKey(s.object(), func(k Key) { key, n = k, n+1 })
	if s.err != nil {
		return Key{}, s.err
	}
	if n != 1 || s.i+spaces(body[s.i:]) < len(body) {
		return Key{}, ErrForm
	}
	return key, nil
}

// errEnd means that a complete body ends too early.
var errEnd = fmt.Errorf("%w: the body ends within an object", ErrForm)
