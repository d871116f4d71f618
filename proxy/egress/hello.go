package egress

import (
	"errors"
	"io"
	"strings"

	"golang.org/x/crypto/cryptobyte"
)

// maxHello is the maximum length of a ClientHello with its record headers. crypto/tls
// has the same maximum.
const maxHello = 64 << 10

// hello is what the proxy reads from a ClientHello.
type hello struct {
	// name is the server name, in lower case. It is empty if the ClientHello has none,
	// or has an encrypted ClientHello, whose outer name may hide another.
	name string
	// alpn are the offered protocols.
	alpn []string
}

var errHello = errors.New("malformed ClientHello")

const (
	recordHandshake    = 22
	messageClientHello = 1
	maxRecord          = 1 << 14
	maxRecords         = 256 // that a ClientHello may be split into

	extensionServerName = 0
	extensionALPN       = 16
	extensionECH        = 0xfe0d
)

// parseHello parses the ClientHello at the start of b. If b is incomplete, the error is
// io.ErrUnexpectedEOF and need is the length that b must have before the next attempt.
// A ClientHello that two parsers could read differently is malformed.
func parseHello(b []byte) (out *hello, need int, err error) {
	message, need, err := handshakeMessage(b)
	if err != nil {
		return nil, need, err
	}
	s := cryptobyte.String(message)
	var session, suites, compressions, extensions cryptobyte.String
	if !s.Skip(2+32) || // version and random
		!s.ReadUint8LengthPrefixed(&session) || len(session) > 32 ||
		!s.ReadUint16LengthPrefixed(&suites) || len(suites) == 0 || len(suites)%2 != 0 ||
		!s.ReadUint8LengthPrefixed(&compressions) || len(compressions) == 0 {
		return nil, 0, errHello
	}
	out = &hello{}
	if s.Empty() {
		return out, 0, nil
	}
	if !s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() || !out.read(extensions) {
		return nil, 0, errHello
	}
	return out, 0, nil
}

// read reads the extensions, and reports whether they are well-formed.
func (h *hello) read(extensions cryptobyte.String) (ok bool) {
	encrypted := false
	seen := map[uint16]bool{}
	for !extensions.Empty() {
		var kind uint16
		var data cryptobyte.String
		if !extensions.ReadUint16(&kind) || !extensions.ReadUint16LengthPrefixed(&data) || seen[kind] {
			return false
		}
		seen[kind] = true
		ok := true
		switch kind {
		case extensionServerName:
			h.name, ok = serverName(data)
		case extensionALPN:
			h.alpn, ok = protocols(data)
		case extensionECH:
			encrypted = true
		}
		if !ok {
			return false
		}
	}
	if encrypted {
		h.name = ""
	}
	return true
}

// handshakeMessage joins the fragments of the first message from the records in b. The
// message must be a ClientHello. If b is incomplete, the error is io.ErrUnexpectedEOF
// and need is the length that b must have before the next attempt.
func handshakeMessage(b []byte) (message []byte, need int, err error) {
	const head, messageHead = 5, 4
	var joined []byte
	for at, records := 0, 0; ; records++ {
		for i, is := range []byte{recordHandshake, 3} {
			if at+i < len(b) && b[at+i] != is {
				return nil, 0, errHello
			}
		}
		if len(b) < at+head {
			return nil, at + head, io.ErrUnexpectedEOF
		}
		length := int(b[at+3])<<8 | int(b[at+4])
		if length == 0 || length > maxRecord || records == maxRecords {
			return nil, 0, errHello
		}
		at += head
		joined = append(joined, b[at:min(at+length, len(b))]...)
		if len(joined) > 0 && joined[0] != messageClientHello {
			return nil, 0, errHello
		}
		if len(joined) >= messageHead {
			end := messageHead + int(joined[1])<<16 + int(joined[2])<<8 + int(joined[3])
			if end > maxHello {
				return nil, 0, errHello
			}
			if len(joined) >= end {
				return joined[messageHead:end], 0, nil
			}
		}
		if at += length; at > len(b) {
			return nil, min(at, maxHello), io.ErrUnexpectedEOF
		}
	}
}

func serverName(data cryptobyte.String) (string, bool) {
	var names, name cryptobyte.String
	var kind uint8
	if !data.ReadUint16LengthPrefixed(&names) || !data.Empty() ||
		!names.ReadUint8(&kind) || kind != 0 ||
		!names.ReadUint16LengthPrefixed(&name) || !names.Empty() {
		return "", false
	}
	return domain(strings.TrimSuffix(string(name), ".")) // servers that accept a trailing dot ignore it
}

func protocols(data cryptobyte.String) (out []string, ok bool) {
	var list cryptobyte.String
	if !data.ReadUint16LengthPrefixed(&list) || list.Empty() || !data.Empty() {
		return nil, false
	}
	for !list.Empty() {
		var p cryptobyte.String
		if !list.ReadUint8LengthPrefixed(&p) || p.Empty() {
			return nil, false
		}
		out = append(out, string(p))
	}
	return out, true
}

// labelChars are the characters of the labels of a host name.
const labelChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"

// domain returns name in lower case, and reports whether it is a valid host name.
func domain(name string) (string, bool) {
	if len(name) > 253 {
		return "", false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.TrimLeft(label, labelChars) != "" {
			return "", false
		}
	}
	return strings.ToLower(name), true
}

// accessDenied is a TLS record with the fatal alert access_denied.
var accessDenied = []byte{21, 3, 3, 0, 2, 2, 49}
