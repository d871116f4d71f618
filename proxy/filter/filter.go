package filter

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"mime"
	"strings"
	"sync/atomic"
)

// Key identifies an object to Keep. Its bytes are valid during the call only.
type Key struct{ Namespace, Name, UID []byte }

// Keep reports whether an object is kept.
type Keep func(Key) bool

// Errors of New, NewEvents, KeyOf and of the readers.
var (
	// ErrType means that the content type is not supported.
	ErrType = errors.New("content type cannot be filtered")
	// ErrForm means that the bytes are not in the encoding of their content type, or lack
	// the key of an object.
	ErrForm = errors.New("malformed")
	// ErrSize means that an object, or a list in an encoding that states its length
	// first, is larger than the bound.
	ErrSize = errors.New("too large to be filtered")
)

// Defaults of Options, in bytes.
const (
	DefaultMaxObject = 16 << 20 // what client-go accepts as one event
	DefaultMaxList   = 256 << 20
)

// Options are the options of a Reader or of Events.
type Options struct {
	// ContentType of the answer.
	ContentType string
	// Watch means that the answer is a stream of events.
	Watch bool
	// ShardSelector, if set, is the selector of the request. A list whose metadata echo
	// it in shardInfo passes unchanged, and Echoed reports true.
	ShardSelector string
	// MaxObject bounds an object, or what comes before or after the items of a list.
	// MaxList bounds what is kept in memory of a list in an encoding that states its
	// length first (protobuf). Both are in bytes, and 0 means the default.
	MaxObject, MaxList int
	// Hold, if set, is called before the reader takes n more bytes of memory than the
	// first 4 KiB of a watch or 64 KiB of a list. An error of Hold ends the answer, and
	// Read returns it.
	Hold func(n int) error
	// Lenient means that what cannot be read, and all after it, passes unchanged.
	Lenient bool
	// Give, if set, is called when a watch waits for an event, and so needs n bytes of Hold
	// no longer. The reader keeps all others as long as it exists.
	Give func(n int)
}

// Reader is a filtered answer. Read returns whole events of a watch as soon as they have
// arrived, and a Read of nothing waits for one. It returns errors of the source unchanged,
// and io.ErrUnexpectedEOF if the source ends within an object.
type Reader struct {
	in   input
	form form
	keep Keep

	out     []byte // unread rest of what form.next returned last
	plain   bool   // the rest of the input passes unchanged
	lenient bool
	echoed  bool
	dropped atomic.Int64
	err     error
}

// form is an encoding of lists or of watches.
type form interface {
	// next takes a piece of the input and returns what is kept of it, which may be
	// nothing. The result is valid until the next call. If next returns errWait, it has
	// changed nothing.
	next(r *Reader) ([]byte, error)
}

// New returns a Reader that filters src. The Reader keeps one object at a time in memory.
// Of a protobuf list it keeps all objects that pass, so that errors occur before the first
// byte.
func New(src io.Reader, keep Keep, o Options) (*Reader, error) {
	in, media, err := newInput(src, o)
	if err != nil {
		return nil, err
	}
	r := &Reader{keep: keep, in: in, lenient: o.Lenient}
	switch {
	case media == typeJSON && o.Watch:
		r.form = &jsonWatch{}
	case media == typeJSON:
		r.form = &jsonList{selector: o.ShardSelector}
	case o.Watch:
		r.form = protoWatch{}
	default:
		r.form = &protoList{selector: o.ShardSelector, max: cmp.Or(o.MaxList, DefaultMaxList)}
	}
	return r, nil
}

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (n int, err error) {
	for n < len(p) || len(p) == 0 {
		if len(r.out) > 0 {
			if len(p) == 0 {
				return 0, nil
			}
			c := copy(p[n:], r.out)
			r.out = r.out[c:]
			n += c
			continue
		}
		if r.err != nil {
			break
		}
		// Return what has arrived, instead of waiting for more.
		r.in.wait = n == 0
		switch {
		case !r.plain:
			r.in.await()
			if r.out, err = r.form.next(r); errors.Is(err, errWait) {
				return n, nil
			}
			if r.plain = r.plain || err != nil && r.lenient; !r.plain {
				r.err = err
			}
		case len(r.in.b) > 0:
			r.out = r.in.take(len(r.in.b))
		case r.in.err != nil:
			r.err = r.in.err
		case n > 0:
			return n, nil
		default:
			return r.in.src.Read(p)
		}
	}
	if n == 0 {
		return 0, r.err
	}
	return n, nil
}

// Echoed reports whether the apiserver itself narrowed the list. It is valid once the
// first byte was read. If the items of a list come before its metadata, as in the JSON of
// custom resources, it is valid only at the end, and the list is filtered nevertheless.
func (r *Reader) Echoed() bool { return r.echoed }

// Dropped returns the number of objects dropped so far. It may be called while another
// goroutine reads.
func (r *Reader) Dropped() int { return int(r.dropped.Load()) }

// decide calls Keep, and counts the objects that it drops.
func (r *Reader) decide(k Key) bool {
	if r.keep(k) {
		return true
	}
	r.dropped.Add(1)
	return false
}

// The media types that can be filtered.
const (
	typeJSON     = "application/json"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
)

// newInput returns an input and the media type of an answer.
func newInput(src io.Reader, o Options) (in input, media string, err error) {
	base := ListBuffer
	if o.Watch {
		base = WatchBuffer
	}
	if o.Hold == nil {
		o.Hold = func(int) error { return nil }
	}
	if o.Give == nil {
		o.Give = func(int) {}
	}
	media, err = mediaType(o.ContentType)
	return input{src: src, watch: o.Watch, max: cmp.Or(o.MaxObject, DefaultMaxObject), hold: o.Hold, give: o.Give, base: base, asked: base}, media, err
}

func mediaType(contentType string) (string, error) {
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil || media != typeJSON && media != typeProtobuf {
		return "", fmt.Errorf("%w: %q", ErrType, contentType)
	}
	return media, nil
}

// SameType reports whether two content types have the same encoding, which is supported.
func SameType(a, b string) bool {
	first, err := mediaType(a)
	second, other := mediaType(b)
	return err == nil && other == nil && first == second
}

// Accept edits an Accept header so that the apiserver answers in a type that can be
// filtered, in the client's order of preference. If no type is left, ok is false, and the
// caller should answer 406. Lists and watches have the same types.
func Accept(header []string) (accept string, ok bool) {
	if strings.TrimSpace(strings.Join(header, "")) == "" {
		return typeJSON, true
	}
	var named, wild []string
	// Split at every comma, quoted or not, as the apiserver does.
	for clause := range strings.SplitSeq(strings.Join(header, ","), ",") {
		clause = strings.TrimSpace(clause)
		media, _, _ := strings.Cut(clause, ";")
		switch strings.TrimSpace(media) {
		case typeJSON, typeProtobuf:
			named = append(named, clause)
		case "*/*", "application/*", "*":
			// The apiserver prefers named types to wildcards.
			wild = append(wild, typeJSON+clause[len(media):])
		}
	}
	kept := append(named, wild...)
	return strings.Join(kept, ","), len(kept) > 0
}
