package lock

import (
	"bytes"
	"errors"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// magic starts every protobuf body of Kubernetes; a runtime.Unknown follows.
var magic = []byte("k8s\x00")

var errProto = errors.New("the body is not a protobuf object of Kubernetes")

// Field numbers of k8s.io/apimachinery's generated.proto.
const (
	unknownTypeMeta, unknownRaw        = 1, 2
	typeMetaKind                       = 2
	objectMetadata, metaName, metaLink = 1, 1, 4
	listItems                          = 2
	statusMessage, statusDetails       = 3, 5
	detailsName                        = 1
	eventObject, extensionRaw          = 2, 1
)

// message maps the fields of a protobuf message that contain names, or messages with
// names, to their edits. All other fields keep their bytes and their order.
type message map[protowire.Number]field

// field edits the bytes of one length-delimited field, and reports whether it changed
// them.
type field func([]byte) ([]byte, bool, error)

func (m message) edit(b []byte) ([]byte, bool, error) {
	var out []byte
	copied := 0
	for pos := 0; pos < len(b); {
		num, typ, tag := protowire.ConsumeTag(b[pos:])
		if tag < 0 {
			return nil, false, errProto
		}
		size := protowire.ConsumeFieldValue(num, typ, b[pos+tag:])
		if size < 0 {
			return nil, false, errProto
		}
		next := pos + tag + size
		if f := m[num]; f != nil && typ == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(b[pos+tag : next])
			edited, changed, err := f(value)
			if err != nil {
				return nil, false, err
			}
			if changed {
				out = append(out, b[copied:pos+tag]...)
				out = protowire.AppendBytes(out, edited)
				copied = next
			}
		}
		pos = next
	}
	if copied == 0 {
		return b, false, nil
	}
	return append(out, b[copied:]...), true, nil
}

func text(swap func(string) (string, bool)) field {
	return func(b []byte) ([]byte, bool, error) {
		s, changed := swap(string(b))
		return []byte(s), changed, nil
	}
}

func (n names) objectMessage() message {
	return message{objectMetadata: message{metaName: text(n.swap), metaLink: text(n.swapLink)}.edit}
}

// answerMessage is answer for protobuf.
func (n names) answerMessage(kind string) message {
	switch {
	case kind == "Status":
		return message{
			statusMessage: text(n.swapQuoted),
			statusDetails: message{detailsName: text(n.swap)}.edit,
		}
	case strings.HasSuffix(kind, "List"):
		return message{listItems: n.objectMessage().edit}
	}
	return n.objectMessage()
}

// editProto edits an object in an envelope. pick returns the message of its kind.
func editProto(b []byte, pick func(kind string) message) ([]byte, bool, error) {
	raw, ok := bytes.CutPrefix(b, magic)
	if !ok {
		return nil, false, errProto
	}
	kind := ""
	_, _, err := message{unknownTypeMeta: message{typeMetaKind: text(note(&kind))}.edit}.edit(raw)
	if err != nil {
		return nil, false, err
	}
	out, changed, err := message{unknownRaw: pick(kind).edit}.edit(raw)
	if err != nil || !changed {
		return b, false, err
	}
	return append(bytes.Clone(magic), out...), true, nil
}
