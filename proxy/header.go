package proxy

import (
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

const auditHeader = "Audit-Id" // Audit-ID, as net/http spells it

// hopByHop headers concern one connection only (RFC 9110, 7.6.1).
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Expect",
}

// dropHopByHop removes the fields that concern only the client's connection.
func (o *outgoing) dropHopByHop() {
	if perConnection(o.header) {
		dropHopByHop(o.own())
	}
}

// perConnection reports whether there are fields that concern one connection only.
func perConnection(h header) bool {
	return slices.ContainsFunc(hopByHop, func(name string) bool { _, has := h[name]; return has })
}

func dropHopByHop(h header) {
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

func setLength(h header, n int) { h["Content-Length"] = []string{strconv.Itoa(n)} }

// bounded returns the beginning of a text that a client chose, for logs.
func bounded(id string) string { return id[:min(len(id), 64)] }
