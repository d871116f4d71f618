package filter

import (
	"errors"
	"fmt"
	"io"
)

// Sizes of buffers in bytes.
const (
	// ListBuffer and WatchBuffer are what a reader takes before it calls Options.Hold.
	ListBuffer  = 64 << 10
	WatchBuffer = 4 << 10
	// minRead is the minimum free room to read into.
	minRead = 1 << 10
)

// errWait means that the input has to wait for more bytes.
var errWait = errors.New("no more bytes yet")

// input is a source with a read-ahead buffer.
type input struct {
	src   io.Reader
	b     []byte // bytes read and not yet taken, at the end of store
	store []byte
	watch bool
	base  int // initial size of store
	hold  func(n int) error
	give  func(n int)
	asked int // size that store may have without a call of hold
	max   int // maximum size of b
	wait  bool
	err   error // of src
}

// await waits for the next event of a watch, unless some of it was read. The buffer is given
// back meanwhile: a watch is idle for most of its life. A read of nothing waits for bytes in
// HTTP/2 and in chunks. If the source returns from it at once, more waits.
func (in *input) await() {
	if !in.watch || !in.wait || len(in.b) > 0 || in.err != nil {
		return
	}
	if in.store != nil {
		putStore(in.store)
		in.b, in.store = nil, nil
		in.give(in.asked - in.base)
		in.asked = in.base
	}
	_, in.err = in.src.Read(nil)
}

// more reads at least one byte. It may move b: indexes into b stay valid, slices of it do
// not.
func (in *input) more() error {
	if in.err != nil {
		return in.err
	}
	if !in.wait {
		return errWait
	}
	if len(in.b) >= in.max {
		return tooLarge(in.max)
	}
	if err := in.room(); err != nil {
		return err
	}
	for range 100 {
		n, err := in.src.Read(in.b[len(in.b):cap(in.b)])
		in.b = in.b[:len(in.b)+n]
		in.err = err
		if n > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	in.err = io.ErrNoProgress
	return in.err
}

// room makes free room after b.
func (in *input) room() error {
	full := in.max + minRead
	if in.store == nil {
		in.store = newStore(min(in.base, full))
	}
	switch {
	case len(in.b) == 0:
		in.b = in.store[:0]
	case cap(in.b)-len(in.b) >= minRead:
	case len(in.b) <= len(in.store)/2 || len(in.store) == full:
		in.b = in.store[:copy(in.store, in.b)]
	default:
		size := min(2*len(in.store), full)
		if more := size - in.asked; more > 0 {
			if err := in.hold(more); err != nil {
				return err
			}
			in.asked = size
		}
		store := newStore(size)
		in.b = store[:copy(store, in.b)]
		if in.watch {
			putStore(in.store)
		}
		in.store = store
	}
	return nil
}

// take removes the first n bytes of b and returns them; they are valid until more.
func (in *input) take(n int) []byte {
	out := in.b[:n]
	in.b = in.b[n:]
	return out
}

func tooLarge(bound int) error { return fmt.Errorf("%w: more than %d bytes", ErrSize, bound) }
