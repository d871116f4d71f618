package http2

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2/hpack"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// name is a usual name of a field.
type name struct {
	canonical string // as net/http has it
	prefix    []byte // of a literal with it in HPACK, before the value
}

// Usual names.
var byLower, byCanonical = func() (byLower, byCanonical map[string]*name) {
	byLower, byCanonical = map[string]*name{}, map[string]*name{}
	var out bytes.Buffer
	enc := hpack.NewEncoder(&out)
	enc.SetMaxDynamicTableSize(0)
	_ = enc.WriteField(hpack.HeaderField{Name: "x"}) // after the update of the size of the table
	for _, canonical := range []string{
		"Accept", "Accept-Encoding", "Accept-Language", "Access-Control-Allow-Origin", "Allow", "Audit-Id", "Authorization",
		"Cache-Control", "Content-Encoding", "Content-Length", "Content-Type", "Cookie", "Date", "Etag", "Expect", "Expires",
		"Host", "Impersonate-Group", "Impersonate-User", "Last-Modified", "Location", "Retry-After", "Server", "Set-Cookie",
		"Strict-Transport-Security", "Te", "Trailer", "Traceparent", "User-Agent", "Vary", "Via", "Warning",
		"X-Content-Type-Options", "X-Forwarded-For", "X-Kubernetes-Pf-Flowschema-Uid", "X-Kubernetes-Pf-Prioritylevel-Uid",
		"X-Stream-Protocol-Version",
	} {
		out.Reset()
		lower := strings.ToLower(canonical)
		_ = enc.WriteField(hpack.HeaderField{Name: lower, Value: "x"})
		n := &name{canonical, slices.Clone(out.Bytes()[:out.Len()-len("1x")])} // without the value and its length
		byLower[lower], byCanonical[canonical] = n, n
	}
	return byLower, byCanonical
}()

// canonicalName returns the name of a field as net/http has it; false if it is not valid in HTTP/2.
func canonicalName(lower string) (string, bool) {
	if n := byLower[lower]; n != nil {
		return n.canonical, true
	}
	if !validName(lower) {
		return "", false
	}
	canonical := http.CanonicalHeaderKey(lower)
	return canonical, !ofHTTP1(canonical)
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

// ofHTTP1 reports whether a field is of a connection of HTTP/1.1, and must not occur here. The name is canonical.
func ofHTTP1(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// Responses are encoded without a dynamic table: most of their values occur once, and a literal costs less than a search.
const (
	emptyTable    = 0x20 // the update of the table's size to 0
	statusOK      = 0x88 // :status 200
	statusLiteral = 0x08 // another one, as a literal that is not indexed
)

// appendStatus appends the status of a response in HPACK.
func appendStatus(b []byte, status int) []byte {
	if status == http.StatusOK {
		return append(b, statusOK)
	}
	return strconv.AppendInt(append(b, statusLiteral, 3), int64(status), 10)
}

// appendFields appends fields in HPACK, except those that are not allowed in HTTP/2.
func appendFields(b []byte, fields header.Fields) []byte {
	for i := range fields {
		f := &fields[i]
		if !httpguts.ValidHeaderFieldValue(f.Value) {
			continue
		}
		if n := byCanonical[f.Name]; n != nil {
			b = append(b, n.prefix...)
		} else if lower := strings.ToLower(f.Name); !ofHTTP1(f.Name) && validName(lower) {
			b = appendString(append(b, 0), lower)
		} else {
			continue
		}
		b = appendString(b, f.Value)
	}
	return b
}

// appendString appends a string without Huffman's code: RFC 7541, section 5.2.
func appendString(b []byte, s string) []byte {
	const most = 1<<7 - 1
	n := len(s)
	if n < most {
		return append(append(b, byte(n)), s...)
	}
	b = append(b, most)
	for n -= most; n >= 1<<7; n >>= 7 {
		b = append(b, byte(n)|1<<7)
	}
	return append(append(b, byte(n)), s...)
}
