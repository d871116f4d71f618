package filter

import (
	"errors"
	"io"
)

// Key is what decides on an object. Its bytes are valid during the call only.
type Key struct{ Namespace, Name, UID []byte }

// Keep tells whether an object stays.
type Keep func(Key) bool

// Errors of New and of what it returns.
var (
	// ErrType: the content type is none that can be filtered.
	ErrType = errors.New("content type cannot be filtered")
	// ErrForm: the bytes are not what their content type says.
	ErrForm = errors.New("malformed")
	// ErrSize: an object, or a list in an encoding that says its length first, is
	// larger than the bound.
	ErrSize = errors.New("too large to be filtered")
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
	// MaxObject bounds one object in bytes, and MaxList what must be held of a list
	// in an encoding that says its length first (protobuf). Defaults when 0.
	MaxObject, MaxList int
	// Hold, if set, is asked before the reader keeps n bytes more, for as long as it
	// lives, than the first 8 KiB of a watch or 64 KiB of a list. Its error ends the
	// answer, and Read returns it.
	Hold func(n int) error
}

// Reader is a filtered answer. Read returns whole events of a watch as soon as
// they have come.
type Reader struct{}

// New filters what src gives. The reader holds one object at a time, but for
// protobuf lists, of which it holds what stays.
func New(src io.Reader, keep Keep, o Options) (*Reader, error) { panic("not written yet") }

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (int, error) { panic("not written yet") }

// Echoed tells, once the first byte was read, whether the list was narrowed by the
// apiserver itself.
func (r *Reader) Echoed() bool { panic("not written yet") }

// Dropped is the number of objects dropped so far.
func (r *Reader) Dropped() int { panic("not written yet") }

// Accept edits an Accept header so that the apiserver answers in something that can
// be filtered, in the client's order of preference. It is not ok when nothing is left:
// the client is to be told 406.
func Accept(header []string, watch bool) (accept string, ok bool) { panic("not written yet") }
