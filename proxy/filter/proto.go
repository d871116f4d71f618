package filter

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// magic starts every protobuf object of Kubernetes; a runtime.Unknown follows.
const magic = "k8s\x00"

// Field numbers of k8s.io/apimachinery's generated.proto.
const (
	unknownTypeMeta, unknownRaw          = 1, 2
	typeMetaVersion, typeMetaKind        = 1, 2
	objectMetadata                       = 1
	metaName, metaNamespace, metaUID     = 1, 3, 5
	metaRevision                         = 6
	listMetadata, listItems              = 1, 2
	listMetaRevision, listMetaContinue   = 2, 3
	listMetaShardInfo, shardInfoSelector = 5, 1
	eventType, eventObject, extensionRaw = 1, 2, 1

	partialListV1beta1 = "meta.k8s.io/v1beta1 PartialObjectMetadataList"
)

// eachBytes calls f with every field of a message whose number is in the bit set numbers.
// It fails if such a field is not length-delimited. As in all readers of protobuf, a later
// field overrides an earlier one of the same number.
func eachBytes(message []byte, numbers uint, f func(number protowire.Number, value []byte) error) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return ErrForm
		}
		size := protowire.ConsumeFieldValue(number, kind, message[n:])
		if size < 0 {
			return ErrForm
		}
		if number < 32 && numbers&(1<<number) != 0 {
			if kind != protowire.BytesType {
				return ErrForm
			}
			value, _ := protowire.ConsumeBytes(message[n:])
			if err := f(number, value); err != nil {
				return err
			}
		}
		message = message[n+size:]
	}
	return nil
}

// store returns a function for eachBytes that stores the value of a field.
func store(to *[]byte) func(protowire.Number, []byte) error {
	return func(_ protowire.Number, value []byte) error {
		*to = value
		return nil
	}
}

// rawKey adds to k the key of an object without its envelope.
func rawKey(raw []byte, k *Key) error {
	return eachBytes(raw, 1<<objectMetadata, func(_ protowire.Number, metadata []byte) error {
		return eachBytes(metadata, 1<<metaName|1<<metaNamespace|1<<metaUID, func(number protowire.Number, value []byte) error {
			switch number {
			case metaName:
				k.Name = value
			case metaNamespace:
				k.Namespace = value
			case metaUID:
				k.UID = value
			}
			return nil
		})
	})
}

// protoKey reads the key of one object.
func protoKey(body []byte) (k Key, err error) {
	raw, err := rawOf(body)
	if err == nil {
		err = rawKey(raw, &k)
	}
	if err != nil {
		return Key{}, err
	}
	return k, nil
}

// rawOf returns the object in an envelope.
func rawOf(body []byte) (raw []byte, err error) {
	unknown, ok := bytes.CutPrefix(body, []byte(magic))
	if !ok {
		return nil, ErrForm
	}
	err = eachBytes(unknown, 1<<unknownRaw, store(&raw))
	return raw, err
}

// protoRevision returns the resourceVersion of one object.
func protoRevision(body []byte) (revision []byte, err error) {
	raw, err := rawOf(body)
	if err != nil {
		return nil, err
	}
	err = eachBytes(raw, 1<<objectMetadata, func(_ protowire.Number, metadata []byte) error {
		return eachBytes(metadata, 1<<metaRevision, store(&revision))
	})
	return revision, err
}

// protoWatch is a stream of events, each preceded by its length.
type protoWatch struct{}

func (protoWatch) next(r *Reader) ([]byte, error) {
	size, kind, object, err := r.in.event()
	if err != nil {
		return nil, err
	}
	keep := true
	if !ofTheStream(kind) {
		k, err := protoKey(object)
		if err != nil {
			return nil, err
		}
		keep = r.decide(k)
	}
	if out := r.in.take(size); keep {
		return out, nil
	}
	return nil, nil
}

// event reads until the input contains a whole event. size includes the length prefix.
func (in *input) event() (size int, kind, object []byte, err error) {
	const head = 4
	if err := in.need(head); err != nil {
		return 0, nil, nil, err
	}
	length := binary.BigEndian.Uint32(in.b)
	if int64(length) > int64(in.max-head) {
		return 0, nil, nil, tooLarge(in.max)
	}
	size = head + int(length)
	if err := in.need(size); err != nil {
		return 0, nil, nil, err
	}
	err = eachBytes(in.b[head:size], 1<<eventType|1<<eventObject, func(number protowire.Number, value []byte) error {
		if number == eventType {
			kind = value
			return nil
		}
		return eachBytes(value, 1<<extensionRaw, store(&object))
	})
	return size, kind, object, err
}

// need reads until the input contains n bytes. It returns io.EOF if the source ended
// before the first.
func (in *input) need(n int) error {
	for len(in.b) < n {
		if err := in.more(); err != nil {
			if errors.Is(err, io.EOF) && len(in.b) > 0 {
				return io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// field reads until the input contains the field at b[from:], and returns its place. It
// returns io.EOF if there is none. The value of a field with the number whole is not read.
func (in *input) field(from int, whole protowire.Number) (f field, err error) {
	for {
		b := in.b[from:]
		number, kind, n := protowire.ConsumeTag(b)
		size := n
		if n > 0 {
			f = field{number: number, kind: kind, value: from + n}
			if number == whole && kind == protowire.BytesType {
				if f.length, size = protowire.ConsumeVarint(b[n:]); size >= 0 {
					f.value += size
					return f, nil
				}
			} else if size = protowire.ConsumeFieldValue(number, kind, b[n:]); size >= 0 {
				f.end = f.value + size
				return f, nil
			}
		}
		if !errors.Is(protowire.ParseError(size), io.ErrUnexpectedEOF) {
			return f, ErrForm
		}
		if err := in.more(); err != nil {
			if errors.Is(err, io.EOF) && len(b) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return f, err
		}
	}
}

// field is a field's place in an input.
type field struct {
	number     protowire.Number
	kind       protowire.Type
	value, end int
	length     uint64 // length of the value of a whole field
}

// bytes returns the value of a length-delimited field.
func (in *input) bytes(f field) ([]byte, error) {
	if f.kind != protowire.BytesType {
		return nil, ErrForm
	}
	value, _ := protowire.ConsumeBytes(in.b[f.value:f.end])
	return value, nil
}

// protoList is a list. Its length precedes it, so what is kept stays in memory.
type protoList struct {
	selector string
	max      int

	held [][]byte // from the first byte on; nil until all was read
	read bool
	size uint64 // in bytes, of what is kept of the list
}

func (l *protoList) next(r *Reader) ([]byte, error) {
	if !l.read {
		out, err := l.readAll(r)
		if err != nil || out != nil {
			return out, err
		}
		l.read = true
	}
	if len(l.held) == 0 {
		return nil, io.EOF
	}
	out := l.held[0]
	l.held[0] = nil
	l.held = l.held[1:]
	return out, nil
}

// readAll reads the list and stores in held what is kept of it. A list that needs no
// filter passes unchanged: readAll then returns its first bytes.
func (l *protoList) readAll(r *Reader) ([]byte, error) {
	in := &r.in
	if err := in.need(len(magic)); err != nil {
		return nil, unexpected(err)
	}
	if string(in.b[:len(magic)]) != magic {
		return nil, ErrForm
	}
	kind := ""
	at := len(magic)
	for {
		f, err := in.field(at, unknownRaw)
		if errors.Is(err, io.EOF) && isList(kind) {
			r.plain = true // the list is empty
			return in.take(len(in.b)), nil
		}
		if err != nil {
			return nil, unexpected(err)
		}
		if f.number == unknownRaw {
			if f.kind != protowire.BytesType {
				return nil, ErrForm
			}
			return l.readRaw(r, at, f, kind)
		}
		if f.number == unknownTypeMeta {
			value, err := in.bytes(f)
			if err != nil || kind != "" {
				return nil, ErrForm
			}
			if kind, err = kindOf(value); err != nil {
				return nil, err
			}
		}
		at = f.end
	}
}

// kindOf returns the version and the kind of a TypeMeta.
func kindOf(typeMeta []byte) (string, error) {
	var version, kind []byte
	err := eachBytes(typeMeta, 1<<typeMetaVersion|1<<typeMetaKind, func(number protowire.Number, value []byte) error {
		if number == typeMetaKind {
			kind = value
		} else {
			version = value
		}
		return nil
	})
	return string(version) + " " + string(kind), err
}

// isList reports whether a kind is a list of typed objects. It excludes the kind List,
// whose items have envelopes.
func isList(kind string) bool {
	return strings.HasSuffix(kind, "List") && !strings.HasSuffix(kind, " List")
}

// unexpected replaces io.EOF by io.ErrUnexpectedEOF.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readRaw reads the list and what follows it. The list is in the field f of the envelope
// at the start of in.b. at is where f begins.
func (l *protoList) readRaw(r *Reader, at int, f field, kind string) ([]byte, error) {
	in := &r.in
	if strings.HasSuffix(kind, " Status") {
		r.plain = true
		return in.take(len(in.b)), nil
	}
	if !isList(kind) {
		return nil, ErrForm
	}
	items, metadata := protowire.Number(listItems), protowire.Number(listMetadata)
	if kind == partialListV1beta1 { // the only list that has these fields swapped
		items, metadata = metadata, items
	}
	if l.selector != "" && f.length > 0 {
		first, err := in.field(f.value, 0)
		if err != nil {
			return nil, unexpected(err)
		}
		if first.number == metadata && l.echoed(in, first) {
			r.plain, r.echoed = true, true
			return in.take(len(in.b)), nil
		}
	}
	// Reserve the place of the head, which needs the length.
	l.held = append(l.held, nil)
	head := bytes.Clone(in.b[:at])
	in.take(f.value)
	for left := f.length; left > 0; {
		n, err := l.readField(r, items, left)
		if err != nil {
			return nil, err
		}
		left -= n
	}
	head = protowire.AppendTag(head, unknownRaw, protowire.BytesType)
	l.held[0] = protowire.AppendVarint(head, l.size)
	return nil, l.readTail(in)
}

// readField reads a field of the list, of which left bytes are left. It holds the field,
// unless it is an item that is dropped. n is the size of the field.
func (l *protoList) readField(r *Reader, items protowire.Number, left uint64) (n uint64, err error) {
	in := &r.in
	f, err := in.field(0, 0)
	if err != nil {
		return 0, unexpected(err)
	}
	if n = uint64(f.end); n > left {
		return 0, ErrForm
	}
	keep := true
	if f.number == items {
		item, err := in.bytes(f)
		if err != nil {
			return 0, err
		}
		var k Key
		if err := rawKey(item, &k); err != nil {
			return 0, err
		}
		keep = r.decide(k)
	}
	if out := in.take(f.end); keep {
		err = l.hold(in, out)
	}
	return n, err
}

// readTail reads what follows the list.
func (l *protoList) readTail(in *input) error {
	for {
		f, err := in.field(0, 0)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if f.number == unknownTypeMeta || f.number == unknownRaw {
			return ErrForm // a second list would override the first
		}
		if err := l.hold(in, in.take(f.end)); err != nil {
			return err
		}
	}
}

// echoed reports whether the metadata of a list echo the shard selector.
func (l *protoList) echoed(in *input, f field) bool {
	metadata, err := in.bytes(f)
	if err != nil {
		return false
	}
	var echo []byte
	err = eachBytes(metadata, 1<<listMetaShardInfo, func(_ protowire.Number, info []byte) error {
		return eachBytes(info, 1<<shardInfoSelector, store(&echo))
	})
	return err == nil && string(echo) == l.selector
}

// Sizes of the pieces in held, in bytes.
const minPiece, maxPiece = 32 << 10, 1 << 20

// hold appends a copy of b to held, in pieces so that growing does not copy them.
func (l *protoList) hold(in *input, b []byte) error {
	l.size += uint64(len(b))
	if l.size > uint64(l.max) {
		return tooLarge(l.max)
	}
	last := len(l.held) - 1
	if room := cap(l.held[last]) - len(l.held[last]); room < len(b) {
		size := max(len(b), min(max(minPiece, 2*cap(l.held[last])), maxPiece))
		if err := in.hold(size); err != nil {
			return err
		}
		l.held = append(l.held, make([]byte, 0, size))
		last++
	}
	l.held[last] = append(l.held[last], b...)
	return nil
}
