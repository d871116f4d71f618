package filter

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"strings"
	"sync/atomic"
)

// Key is what decides on an object. Its bytes are valid during the call only.
type Key struct{ Namespace, Name, UID []byte }

// Keep reports whether an object stays.
type Keep func(Key) bool

// Errors of New and of what it returns.
var (
	// ErrType: the content type is none that can be filtered.
	ErrType = errors.New("content type cannot be filtered")
	// ErrForm: the bytes are not what their content type says, or do not tell what
	// would decide on an object.
	ErrForm = errors.New("malformed")
	// ErrSize: an object, or a list in an encoding that says its length first, is
	// larger than the bound.
	ErrSize = errors.New("too large to be filtered")
)

// Defaults of Options, in bytes.
const (
	DefaultMaxObject = 16 << 20 // what client-go takes of one event
	DefaultMaxList   = 256 << 20
)

// Options of a filter.
type Options struct {
	// ContentType of the answer.
	ContentType string
	// Watch: the answer is a stream of events.
	Watch bool
	// ShardSelector, if set: a list whose metadata echo it in shardInfo is passed as
	// it is, and Echoed tells so.
	ShardSelector string
	// MaxObject bounds one object in bytes, or what comes before or after those of a
	// list, and MaxList what must be held of a list in an encoding that says its
	// length first (protobuf). Defaults when 0.
	MaxObject, MaxList int
	// Hold, if set, is asked before the reader keeps n bytes more, for as long as it
	// lives, than the first 8 KiB of a watch or 64 KiB of a list. Its error ends the
	// answer, and Read returns it.
	Hold func(n int) error
}

// Reader is a filtered answer. Read returns whole events of a watch as soon as
// they have come. An error of the source is returned as it is, and
// io.ErrUnexpectedEOF if it ends within an object.
type Reader struct {
	in   input
	form form
	keep Keep

	out     []byte // the rest of what the form returned last
	plain   bool   // what follows is passed as it is
	echoed  bool
	dropped atomic.Int64
	err     error
}

// form is an encoding of lists or of watches.
type form interface {
	// next takes a piece off the input and returns what stays of it, which may be
	// nothing, valid until the next call. On errWait it has changed nothing.
	next(r *Reader) ([]byte, error)
}

// New filters what src gives. The reader holds one object at a time, but for
// protobuf lists, of which it holds what stays: these fail, if they do, before
// the first byte.
func New(src io.Reader, keep Keep, o Options) (*Reader, error) {
	if o.MaxObject == 0 {
		o.MaxObject = DefaultMaxObject
	}
	if o.MaxList == 0 {
		o.MaxList = DefaultMaxList
	}
	media, err := mediaType(o.ContentType)
	if err != nil {
		return nil, err
	}
	r := &Reader{keep: keep, in: input{src: src, max: o.MaxObject, hold: o.Hold, base: listBuffer}}
	if o.Watch {
		r.in.base = watchBuffer
	}
	r.in.asked = r.in.base
	switch {
	case media == typeJSON && o.Watch:
		r.form = &jsonWatch{}
	case media == typeJSON:
		r.form = &jsonList{selector: o.ShardSelector}
	case o.Watch:
		r.form = protoWatch{}
	default:
		r.form = &protoList{selector: o.ShardSelector, max: o.MaxList}
	}
	return r, nil
}

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (n int, err error) {
	for n < len(p) {
		if len(r.out) > 0 {
			c := copy(p[n:], r.out)
			r.out = r.out[c:]
			n += c
			continue
		}
		if r.err != nil {
			break
		}
		// What has come is not held back for what has not.
		r.in.wait = n == 0
		switch {
		case !r.plain:
			if r.out, err = r.form.next(r); err == errWait { //nolint:errorlint // it is ours alone
				return n, nil
			}
			r.err = err
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

// Echoed tells, once the first byte was read, whether the list was narrowed by the
// apiserver itself. Of a list whose items come before its metadata, as JSON of
// custom resources has it, it tells at the end only; such a list is filtered.
func (r *Reader) Echoed() bool { return r.echoed }

// Dropped is the number of objects dropped so far. It may be asked while another
// goroutine reads.
func (r *Reader) Dropped() int { return int(r.dropped.Load()) }

// decide asks what Keep says.
func (r *Reader) decide(k Key) bool {
	if r.keep(k) {
		return true
	}
	r.dropped.Add(1)
	return false
}

// The types that can be filtered.
const (
	typeJSON     = "application/json"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
)

func mediaType(contentType string) (string, error) {
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil || media != typeJSON && media != typeProtobuf {
		return "", fmt.Errorf("%w: %q", ErrType, contentType)
	}
	return media, nil
}

// Accept edits an Accept header so that the apiserver answers in something that can
// be filtered, in the client's order of preference. It is not ok when nothing is left:
// the client is to be told 406. Lists and watches accept the same.
func Accept(header []string) (accept string, ok bool) {
	if strings.TrimSpace(strings.Join(header, "")) == "" {
		return typeJSON, true
	}
	var named, wild []string
	// Cut at every comma, quoted or not, as the apiserver does.
	for clause := range strings.SplitSeq(strings.Join(header, ","), ",") {
		clause = strings.TrimSpace(clause)
		media, _, _ := strings.Cut(clause, ";")
		switch strings.TrimSpace(media) {
		case typeJSON, typeProtobuf:
			named = append(named, clause)
		case "*/*", "application/*", "*":
			// The apiserver prefers the named to these.
			wild = append(wild, typeJSON+clause[len(media):])
		}
	}
	kept := append(named, wild...)
	return strings.Join(kept, ","), len(kept) > 0
}
