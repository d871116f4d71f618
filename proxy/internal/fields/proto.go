// Package fields walks over the fields of bodies, JSON objects and protobuf messages, without
// decoding them: decoded, a body may take a multiple of its size.
package fields

import (
	"bytes"
	"encoding/binary"
	"errors"

	"google.golang.org/protobuf/encoding/protowire"
)

// Magic starts every protobuf body of Kubernetes; a runtime.Unknown follows.
const Magic = "k8s\x00"

// ErrProto means that a body is not a protobuf object of Kubernetes.
var ErrProto = errors.New("the body is not a protobuf object of Kubernetes")

// Field is a field of a protobuf message.
type Field struct {
	Number protowire.Number
	Type   protowire.Type
	// Value is the content of a length-delimited field, and the encoded value of others.
	Value []byte
	// From and To are where the field is in the message. Behind is where its tag ends: what
	// follows of a length-delimited field is a length, which need not be the shortest encoding.
	From, Behind, To int
}

// Bytes returns the content of a field. It fails if the field is not length-delimited.
func (f *Field) Bytes() ([]byte, error) {
	if f.Type != protowire.BytesType {
		return nil, ErrProto
	}
	return f.Value, nil
}

// Varint returns the value of a field. It fails if the field is no varint.
func (f *Field) Varint() (uint64, error) {
	if f.Type != protowire.VarintType {
		return 0, ErrProto
	}
	v, _ := protowire.ConsumeVarint(f.Value)
	return v, nil
}

// Walk calls yield with each field of a message, until yield fails. The field is valid until
// yield returns. As in all readers of protobuf, a later field overrides an earlier one of the
// same number.
func Walk(message []byte, yield func(f *Field) error) error {
	var f Field
	for f.To < len(message) {
		f.From = f.To
		var n int
		if f.Number, f.Type, n = protowire.ConsumeTag(message[f.From:]); n < 0 {
			return ErrProto
		}
		f.Behind = f.From + n
		size := protowire.ConsumeFieldValue(f.Number, f.Type, message[f.Behind:])
		if size < 0 {
			return ErrProto
		}
		f.To = f.Behind + size
		f.Value = message[f.Behind:f.To]
		if f.Type == protowire.BytesType {
			f.Value, _ = protowire.ConsumeBytes(f.Value)
		}
		if err := yield(&f); err != nil {
			return err
		}
	}
	return nil
}

// Envelope is a body that was opened.
type Envelope struct {
	Kind string
	// Raw is the object; the zero Field if there is none.
	Raw Field

	message []byte
}

// Field numbers of k8s.io/apimachinery's generated.proto.
const (
	unknownTypeMeta, unknownRaw = 1, 2
	typeMetaKind                = 2
)

// Open opens a body.
func Open(body []byte) (e Envelope, err error) {
	message, ok := bytes.CutPrefix(body, []byte(Magic))
	if !ok {
		return e, ErrProto
	}
	e.message = message
	err = Walk(message, func(f *Field) error {
		switch f.Number {
		case unknownTypeMeta:
			meta, err := f.Bytes()
			if err != nil {
				return err
			}
			return Walk(meta, func(f *Field) error {
				if f.Number == typeMetaKind {
					e.Kind = string(f.Value)
				}
				return nil
			})
		case unknownRaw:
			e.Raw = *f
			_, err := f.Bytes()
			return err
		}
		return nil
	})
	return e, err
}

// Append returns a body whose object has a further field.
func (e *Envelope) Append(number protowire.Number, value []byte) []byte {
	size := protowire.SizeTag(number) + protowire.SizeBytes(len(value))
	out := make([]byte, 0, len(Magic)+len(e.message)+size+2*binary.MaxVarintLen32)
	out = append(append(out, Magic...), e.message[:e.Raw.From]...)
	out = protowire.AppendTag(out, unknownRaw, protowire.BytesType)
	out = protowire.AppendVarint(out, uint64(len(e.Raw.Value)+size))
	out = append(out, e.Raw.Value...)
	out = protowire.AppendBytes(protowire.AppendTag(out, number, protowire.BytesType), value)
	return append(out, e.message[e.Raw.To:]...)
}
