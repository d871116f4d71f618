package lock

import (
	"bytes"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

// Field numbers of k8s.io/apimachinery's generated.proto.
const (
	unknownRaw                         = 2
	objectMetadata, metaName, metaLink = 1, 1, 4
	metaVersion, metaAnnotations       = 6, 12
	entryKey, entryValue               = 1, 2 // of a map
	leaseSpec                          = 2
	specHolder, specSeconds            = 1, 2
	specAcquired, specTransitions      = 3, 5
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
	out := fields.NewEdit(b)
	err := fields.Walk(b, func(f *fields.Field) error {
		edit := m[f.Number]
		if edit == nil || f.Type != protowire.BytesType {
			return nil
		}
		edited, changed, err := edit(f.Value)
		if changed {
			out.Replace(f.Behind, f.To, protowire.AppendBytes(nil, edited))
		}
		return err
	})
	if err != nil {
		return nil, false, err
	}
	edited, changed := out.Result()
	return edited, changed, nil
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
	envelope, err := fields.Open(b)
	if err != nil {
		return nil, false, err
	}
	const magic = len(fields.Magic)
	out, changed, err := message{unknownRaw: pick(envelope.Kind).edit}.edit(b[magic:])
	if err != nil || !changed {
		return b, false, err
	}
	return append(bytes.Clone(b[:magic]), out...), true, nil
}
