package http2

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2/hpack"
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
	fields                          []hpack.HeaderField
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
	if _, known := canonical[f.Name]; !known && !validName(f.Name) || !httpguts.ValidHeaderFieldValue(f.Value) {
		b.invalid = true
		return
	}
	b.fields = append(b.fields, f)
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

// validName reports whether a name is a token without capital letters.
func validName(name string) bool {
	for i := range len(name) {
		if c := name[i]; 'A' <= c && c <= 'Z' {
			return false
		}
	}
	return httpguts.ValidHeaderFieldName(name)
}

var errMalformed = errors.New("malformed request")

// request fills r in; an error if the request is malformed.
func (b *block) request(r *http.Request, u *url.URL) error {
	if b.invalid || !validName(strings.ToLower(b.method)) {
		return errMalformed
	}
	if err := b.header(r); err != nil {
		return err
	}
	r.Method, r.Proto, r.ProtoMajor, r.URL = b.method, "HTTP/2.0", 2, u
	if err := b.host(r); err != nil {
		return err
	}
	if b.method == http.MethodConnect {
		if b.path != "" || b.scheme != "" || b.authority == "" {
			return errMalformed
		}
		u.Host, r.RequestURI = b.authority, b.authority
	} else {
		if b.scheme != "https" && b.scheme != "http" {
			return errMalformed
		}
		r.RequestURI = b.path
		if err := parseTarget(b.path, b.method, u); err != nil {
			return err
		}
	}
	return b.length(r)
}

// header fills the header of r in.
func (b *block) header(r *http.Request) error {
	h := make(http.Header, len(b.fields))
	values := make([]string, 0, len(b.fields))
	for _, f := range b.fields {
		name := canonicalName(f.Name)
		if ofHTTP1(name) || name == "Te" && f.Value != "trailers" {
			return errMalformed
		}
		if old, ok := h[name]; ok {
			if name == "Cookie" { // which HTTP/2 may divide
				old[0] += "; " + f.Value
			} else {
				h[name] = append(old, f.Value)
			}
			continue
		}
		values = append(values, f.Value)
		h[name] = values[len(values)-1 : len(values) : len(values)]
	}
	r.Header = h
	if names, ok := h["Trailer"]; ok {
		delete(h, "Trailer")
		r.Trailer = http.Header{}
		for _, name := range announced(names) {
			r.Trailer[name] = nil
		}
	}
	return nil
}

// announced returns the names of the fields of a trailer, by the values of Trailer.
func announced(lists []string) (names []string) {
	for _, list := range lists {
		for name := range strings.SplitSeq(list, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); httpguts.ValidTrailerHeader(name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// ofHTTP1 reports whether a field is of a connection of HTTP/1.1, and must not occur here. The name is canonical.
func ofHTTP1(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// host fills the host of r in. There must not be two that differ.
func (b *block) host(r *http.Request) error {
	r.Host = b.authority
	hosts, ok := r.Header["Host"]
	if !ok {
		return nil
	}
	delete(r.Header, "Host")
	if r.Host == "" {
		r.Host = hosts[0]
	}
	if len(hosts) > 1 || hosts[0] != r.Host {
		return errMalformed
	}
	return nil
}

// length fills the length of the body in: -1 if it is not known.
func (b *block) length(r *http.Request) error {
	r.ContentLength = -1
	if values, ok := r.Header["Content-Length"]; ok {
		n, err := strconv.ParseUint(values[0], 10, 63)
		if err != nil || len(values) > 1 {
			return errMalformed
		}
		r.ContentLength = int64(n)
	}
	if b.end {
		if r.ContentLength > 0 {
			return errMalformed
		}
		r.ContentLength = 0
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

// canonicalName returns the name of a field as net/http has it.
func canonicalName(name string) string {
	if c, ok := canonical[name]; ok {
		return c
	}
	return http.CanonicalHeaderKey(name)
}

// lowerName returns the name of a field as HTTP/2 has it.
func lowerName(name string) string {
	if l, ok := lower[name]; ok {
		return l
	}
	return strings.ToLower(name)
}

// Names of the usual fields.
var canonical, lower = func() (canonical, lower map[string]string) {
	canonical, lower = map[string]string{}, map[string]string{}
	for _, name := range []string{
		"Accept", "Accept-Encoding", "Accept-Language", "Access-Control-Allow-Origin", "Allow", "Audit-Id", "Authorization",
		"Cache-Control", "Content-Encoding", "Content-Length", "Content-Type", "Cookie", "Date", "Etag", "Expect", "Expires",
		"Host", "Impersonate-Group", "Impersonate-User", "Last-Modified", "Location", "Retry-After", "Server", "Set-Cookie",
		"Strict-Transport-Security", "Te", "Trailer", "Traceparent", "User-Agent", "Vary", "Via", "Warning",
		"X-Content-Type-Options", "X-Forwarded-For", "X-Kubernetes-Pf-Flowschema-Uid", "X-Kubernetes-Pf-Prioritylevel-Uid",
		"X-Stream-Protocol-Version",
	} {
		canonical[strings.ToLower(name)] = name
		lower[name] = strings.ToLower(name)
	}
	return canonical, lower
}()
