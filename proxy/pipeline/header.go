package pipeline

import (
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

const AuditHeader = "Audit-Id" // Audit-ID, as net/http spells it

// hopByHop headers concern one connection only (RFC 9110, 7.6.1).
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Expect",
}

// DropHopByHop removes the fields that concern only the client's connection.
func (o *Outgoing) DropHopByHop() {
	if perConnection(o.Header) {
		DropHopByHop(o.own())
	}
}

// perConnection reports whether there are fields that concern one connection only.
func perConnection(h Header) bool {
	return slices.ContainsFunc(hopByHop, func(name string) bool { _, has := h[name]; return has })
}

func DropHopByHop(h Header) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name != "" {
				delete(h, textproto.CanonicalMIMEHeaderKey(name))
			}
		}
	}
	for _, name := range hopByHop {
		delete(h, name)
	}
}

func SetLength(h Header, n int) { h["Content-Length"] = []string{strconv.Itoa(n)} }

// Bounded returns the beginning of a text that a client chose, for logs.
func Bounded(id string) string { return id[:min(len(id), 64)] }
