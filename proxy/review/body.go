package review

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/ctrlmesh/ctrlmesh/proxy/bounds"
)

// errBound means that the client has too many reviews in progress.
var errBound = errors.New("too many reviews in progress")

// charged charges a client for the first bytes of a body, which are kept in memory, as they
// arrive: a length that a client only announces takes nothing from others.
type charged struct {
	io.ReadCloser
	held *bounds.Share
	left int64 // bytes that are kept when they arrive
	err  error
}

func (c *charged) Read(b []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.ReadCloser.Read(b)
	kept := min(int64(n), c.left)
	c.left -= kept
	if kept > 0 && !c.held.Take(bodyCopies*kept) {
		c.err = errBound
		return 0, c.err
	}
	return n, err
}

// body is the body of a request, of which the beginning was read. It can be sent again
// unless more than that was read.
type body struct {
	head []byte
	rest *rest // nil if head is everything
}

// rest is what follows the head of a body. One transport may read it.
type rest struct {
	io.Reader
	state atomic.Int32
}

const (
	untouched int32 = iota
	touched         // a transport reads it
	taken           // from a transport that did not begin to read it
)

var errTaken = errors.New("the request is sent to another pod")

func (r *rest) Read(b []byte) (int, error) {
	if !r.state.CompareAndSwap(untouched, touched) && r.state.Load() != touched {
		return 0, errTaken
	}
	return r.Reader.Read(b)
}

// begin reads the beginning of a body: limit bytes, or all of it.
func begin(from io.Reader, limit int64) (*body, error) {
	head, err := io.ReadAll(io.LimitReader(from, limit))
	b := &body{head: head}
	if int64(len(head)) == limit {
		b.rest = &rest{Reader: from}
	}
	return b, err
}

// set makes r send the body. It reports false if it cannot be sent any more.
func (b *body) set(r *http.Request) bool {
	if b.rest != nil {
		if !b.rest.state.CompareAndSwap(untouched, taken) {
			return false
		}
		b.rest = &rest{Reader: b.rest.Reader}
		r.Body = io.NopCloser(io.MultiReader(bytes.NewReader(b.head), b.rest))
		return true
	}
	r.ContentLength = int64(len(b.head))
	r.GetBody = func() (io.ReadCloser, error) {
		if len(b.head) == 0 {
			return http.NoBody, nil
		}
		return io.NopCloser(bytes.NewReader(b.head)), nil
	}
	r.Body, _ = r.GetBody()
	// Webhooks must expect a review twice. The header is not sent: it lets net/http send the
	// request again if an idle connection was closed meanwhile.
	r.Header["Idempotency-Key"] = nil
	return true
}
