package egress

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
)

const (
	// speakTimeout is how long the proxy waits for the first bytes of a client: in some
	// protocols the server speaks first.
	speakTimeout = 3 * time.Second
	// maxMethod and maxLine bound, in bytes, the method and the request line that may be
	// HTTP.
	maxMethod = 64
	maxLine   = 16 << 10
)

// kind is the protocol that a connection speaks.
type kind int

const (
	undecided kind = iota
	speaksTLS
	speaksHTTP  // 1.x, or close to it
	speaksHTTP2 // without TLS
	speaksOther
	speaksNothing // closed, or sent too much
)

var methods = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "TRACE"}

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// recognise returns the protocol that b begins. If that is undecided, need is the length
// that b must have before the next attempt. Everything that a lenient server would take
// for HTTP counts as HTTP: the parser then refuses what is malformed.
func recognise(b []byte) (k kind, h *hello, need int) {
	if len(b) == 0 {
		return undecided, nil, 1
	}
	if b[0] == recordHandshake {
		h, need, err := parseHello(b)
		switch {
		case err == nil:
			return speaksTLS, h, 0
		case errors.Is(err, io.ErrUnexpectedEOF) && need <= maxHello:
			return undecided, nil, need
		}
		return speaksOther, nil, 0
	}
	if k := recogniseHTTP(b); k != undecided {
		return k, nil, 0
	}
	return undecided, nil, len(b) + 1
}

// recogniseHTTP is recognise for bytes that do not begin TLS.
func recogniseHTTP(b []byte) kind {
	line := bytes.TrimLeft(b, "\r\n")
	if n := min(len(line), len(preface)); string(line[:n]) == preface[:n] && n > 0 {
		if n == len(preface) {
			return speaksHTTP2
		}
		return undecided
	}
	line, _, ended := bytes.Cut(line, []byte{'\n'})
	method, _, spaced := bytes.Cut(line, []byte{' '})
	if tab := bytes.IndexByte(method, '\t'); tab >= 0 {
		method, spaced = method[:tab], true
	}
	switch {
	case len(line) == 0 && len(b) < maxMethod:
		return undecided
	case len(method) == 0 || len(method) > maxMethod || !spaced && ended || !token(method):
		return speaksOther
	case !spaced:
		return undecided
	case slices.Contains(methods, strings.ToUpper(string(method))), bytes.Contains(line, []byte("HTTP/")), len(b) > maxLine:
		return speaksHTTP
	case ended:
		return speaksOther
	}
	return undecided
}

func token(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return !httpguts.IsTokenRune(rune(c)) })
}

// sniff reads until the protocol of the client is known. c.early contains what it read.
func (c *conn) sniff() (kind, *hello) {
	defer func() { _ = c.Conn.SetReadDeadline(time.Time{}) }()
	timeout := speakTimeout
	if len(c.early) > 0 {
		timeout = downstream.HeadTimeout
	}
	_ = c.Conn.SetReadDeadline(time.Now().Add(timeout))
	k, h, need := recognise(c.early)
	for k == undecided {
		// At most double the buffer: the client may announce more than it sends.
		free := slices.Grow(c.early, max(512, min(need-len(c.early), len(c.early))))
		n, err := c.Conn.Read(free[len(c.early):cap(free)])
		if len(c.early) == 0 && n > 0 {
			_ = c.Conn.SetReadDeadline(time.Now().Add(downstream.HeadTimeout))
		}
		c.early = free[:len(c.early)+n]
		if err != nil && n == 0 {
			// On ErrTooMuch, Read dropped bytes, so that the rest cannot be forwarded.
			if errors.Is(err, downstream.ErrTooMuch) || len(c.early) == 0 && !errors.Is(err, os.ErrDeadlineExceeded) {
				return speaksNothing, nil
			}
			return speaksOther, nil
		}
		if len(c.early) >= need {
			k, h, need = recognise(c.early)
		}
	}
	return k, h
}
