package http2

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2/hpack"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// block is the header block that is being received. It is reused.
type block struct {
	dec *hpack.Decoder
	max int // of size

	stream  uint32
	more    bool // CONTINUATION follows
	end     bool // of the request
	trailer bool // it has no pseudo-header fields
	frames  int
	bytes   int // as received
	size    int // decoded
	large   bool
	invalid bool // the request is malformed: RFC 9113, section 8.1.1

	method, scheme, authority, path string
	fields                          header.Fields
}

func (b *block) init(most int) {
	b.max = most
	b.dec = hpack.NewDecoder(table, b.field)
	b.dec.SetMaxStringLength(most)
}

func (b *block) open() bool { return b.more }

// begin begins a block with HEADERS.
func (b *block) begin(stream uint32, end bool) {
	clear(b.fields)
	fields := b.fields[:0]
	if cap(fields) > 128 {
		fields = nil
	}
	*b = block{dec: b.dec, max: b.max, fields: fields, stream: stream, more: true, end: end, trailer: true}
	b.dec.SetEmitEnabled(true)
}

// read decodes a part of the block.
func (b *block) read(p []byte, last bool) error {
	b.frames++
	if b.bytes += len(p); b.frames > maxBlockFrames || b.bytes > 2*b.max {
		return &connError{codeCalm, "header block without end"}
	}
	_, err := b.dec.Write(p)
	if err == nil && last {
		b.more = false
		err = b.dec.Close()
	}
	if err != nil {
		return &connError{codeCompression, "decoding a header block: " + err.Error()}
	}
	return nil
}

// field adds a decoded field.
func (b *block) field(f hpack.HeaderField) {
	if b.size += int(f.Size()); b.size > b.max {
		b.large = true
		b.dec.SetEmitEnabled(false) // the rest is decoded for the table alone
		return
	}
	if strings.HasPrefix(f.Name, ":") {
		b.pseudo(f)
		return
	}
	name, ok := canonicalName(f.Name)
	if !ok || !httpguts.ValidHeaderFieldValue(f.Value) {
		b.invalid = true
		return
	}
	b.fields = append(b.fields, header.Field{Name: name, Value: f.Value})
}

func (b *block) pseudo(f hpack.HeaderField) {
	b.trailer = false
	var to *string
	switch f.Name {
	case ":method":
		to = &b.method
	case ":scheme":
		to = &b.scheme
	case ":authority":
		to = &b.authority
	case ":path":
		to = &b.path
	default:
		b.invalid = true
		return
	}
	if *to != "" || f.Value == "" || len(b.fields) > 0 {
		b.invalid = true
	}
	*to = f.Value
}

var errMalformed = errors.New("malformed request")

// Request is the head of a request.
type Request struct {
	Method, Host, Target string  // as sent
	URL                  url.URL // of Target
	Header               header.Fields
	Length               int64 // of the body in bytes; -1: unknown
}

// request fills r in; an error if the request is malformed.
func (b *block) request(r *Request) error {
	if b.invalid || !validMethod(b.method) {
		return errMalformed
	}
	r.Method, r.Host = b.method, b.authority
	if err := b.header(r); err != nil {
		return err
	}
	if b.method == http.MethodConnect {
		if b.path != "" || b.scheme != "" || b.authority == "" {
			return errMalformed
		}
		r.URL.Host, r.Target = b.authority, b.authority
	} else {
		if b.scheme != "https" && b.scheme != "http" {
			return errMalformed
		}
		r.Target = b.path
		if err := parseTarget(b.path, b.method, &r.URL); err != nil {
			return err
		}
	}
	return b.length(r)
}

// validMethod reports whether a method is a token.
func validMethod(method string) bool {
	switch method {
	case http.MethodGet, http.MethodPut, http.MethodPost, http.MethodPatch, http.MethodDelete:
		return true
	}
	return httpguts.ValidHeaderFieldName(method)
}

// header fills in the header of r, and what it says about the host.
func (b *block) header(r *Request) error {
	h := make(header.Fields, 0, len(b.fields))
	hosts, cookie := 0, -1
	for _, f := range b.fields {
		switch {
		case f.Name == "Te" && f.Value != "trailers":
			return errMalformed
		case f.Name == "Cookie" && cookie >= 0: // which HTTP/2 may divide
			h[cookie].Value += "; " + f.Value
			continue
		case f.Name == "Cookie":
			cookie = len(h)
		case f.Name == "Host": // there must not be two that differ
			if r.Host == "" {
				r.Host = f.Value
			}
			if hosts++; hosts > 1 || f.Value != r.Host {
				return errMalformed
			}
			continue
		}
		h = append(h, f)
	}
	r.Header = h
	return nil
}

// length fills in the length of the body.
func (b *block) length(r *Request) error {
	r.Length = -1
	if length, declared := r.Header.Count("Content-Length"); declared > 0 {
		n, err := strconv.ParseUint(length, 10, 63)
		if err != nil || declared > 1 {
			return errMalformed
		}
		r.Length = int64(n)
	}
	if b.end {
		if r.Length > 0 {
			return errMalformed
		}
		r.Length = 0
	}
	return nil
}

// parseTarget fills u in from :path.
func parseTarget(path, method string, u *url.URL) error {
	if path == "*" && method == http.MethodOptions {
		u.Path = "*"
		return nil
	}
	if !strings.HasPrefix(path, "/") {
		return errMalformed
	}
	if !printable(path) {
		return errMalformed
	}
	if bare, query, asked := strings.Cut(path, "?"); plain(bare) && !strings.Contains(query, "#") {
		u.Path, u.RawQuery, u.ForceQuery = bare, query, asked && query == ""
		return nil
	}
	parsed, err := url.ParseRequestURI(path)
	if err != nil {
		return errMalformed
	}
	*u = *parsed
	return nil
}

// plain reports whether a path has only characters that url.Parse leaves as they are.
func plain(path string) bool {
	for i := range len(path) {
		switch c := path[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case strings.IndexByte("/-_.~$&+,:;=@", c) >= 0:
		default:
			return false
		}
	}
	return true
}

// printable reports whether a target has neither spaces nor control characters: in HTTP/1.1 it would end there.
func printable(path string) bool {
	for i := range len(path) {
		if c := path[i]; c <= ' ' || c == 0x7f {
			return false
		}
	}
	return true
}
