package filter

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Items reads the objects of a list one by one, and encodes them as events of a watch. It
// keeps one object at a time in memory. A list that is to be continued is malformed.
type Items struct {
	in   input
	form itemForm
	list listHead
}

// listHead is what a list says of itself. The kind is that of its items. In JSON of custom
// resources it comes after the items.
type listHead struct {
	schema.GroupVersionKind
	revision string
}

// itemForm is an encoding of lists, and of the events with their items.
type itemForm interface {
	// next reads the next item. It returns io.EOF after a whole list.
	next(in *input, head *listHead) (Item, error)
	// event encodes an event. The object is as next returned it.
	event(kind string, object []byte, of schema.GroupVersionKind) ([]byte, error)
	// bookmark encodes an object that has nothing but a version.
	bookmark(head *listHead) []byte
}

// Item is an object of a list. It is valid until the next one is read.
type Item struct {
	Key    Key
	object []byte
}

// NewItems returns the Items of a list. It ignores the options for watches. Lists that are
// tables are refused: their rows are no objects.
func NewItems(src io.Reader, o Options) (*Items, error) {
	o.Watch = false
	in, media, err := newInput(src, o)
	if err != nil {
		return nil, err
	}
	in.wait = true
	i := &Items{in: in, form: &jsonItems{}}
	if media == typeProtobuf {
		i.form = &protoItems{}
	}
	return i, nil
}

// Next returns the next object, and io.EOF after the last one of a complete list.
func (i *Items) Next() (Item, error) { return i.form.next(&i.in, &i.list) }

// Revision returns the resource version of the list, once Next has read it: in protobuf
// before the items, in JSON before or after them. Until then it is empty.
func (i *Items) Revision() string { return i.list.revision }

// Event encodes an event (ADDED, MODIFIED or DELETED) about an object.
func (i *Items) Event(kind string, of Item) ([]byte, error) {
	return i.form.event(kind, of.object, i.list.GroupVersionKind)
}

// Bookmark encodes a bookmark at the version of the list. It is valid after io.EOF.
func (i *Items) Bookmark() ([]byte, error) {
	if i.list.Kind == "" || i.list.revision == "" {
		return nil, ErrForm
	}
	return i.form.event("BOOKMARK", i.form.bookmark(&i.list), i.list.GroupVersionKind)
}

// setKind derives the kind of the items from that of the list, as in kindOf.
func (h *listHead) setKind(list string) error {
	version, kind, _ := strings.Cut(list, " ")
	if !isList(list) || h.Kind != "" {
		return ErrForm
	}
	h.GroupVersionKind = schema.FromAPIVersionAndKind(version, strings.TrimSuffix(kind, "List"))
	return nil
}

// jsonItems reads a list in JSON.
type jsonItems struct {
	at                                  place
	first                               bool
	kind, version, items, revised, more span
	// kindText and versionText are the texts at kind and version.
	kindText, versionText string
}

func (l *jsonItems) next(in *input, head *listHead) (Item, error) {
	if l.at != within {
		if err := l.around(in, head); err != nil {
			return Item{}, err
		}
	}
	s := scanner{in: in}
	if s.peek() == ']' {
		s.i++
		l.at = behind
		if s.err != nil {
			return Item{}, s.err
		}
		in.take(s.i)
		return l.next(in, head)
	}
	if !l.first {
		s.expect(',')
		s.peek()
	}
	from := s.i
	o := s.object()
	item := Item{Key: s.keyOf(o)}
	if s.err != nil {
		return Item{}, s.err
	}
	if len(item.Key.Name) == 0 {
		return Item{}, ErrForm
	}
	l.first = false
	typed := o.kind.set && o.version.set
	if typed && head.Kind == "" { // a custom resource: the kind of its list may be any
		head.GroupVersionKind = schema.FromAPIVersionAndKind(string(s.text(o.version)), string(s.text(o.kind)))
	}
	item.object = in.take(s.i)[from:]
	if !typed {
		if o.kind.set || o.version.set || head.Kind == "" || item.object[0] != '{' {
			return Item{}, ErrForm
		}
		item.object = append(typeMeta(head.GroupVersionKind), item.object[1:]...)
	}
	return item, nil
}

// typeMeta returns the beginning of an object of a kind. Items of kinds that are built in
// omit it.
func typeMeta(of schema.GroupVersionKind) []byte {
	whole, _ := json.Marshal(metav1.TypeMeta{Kind: of.Kind, APIVersion: of.GroupVersion().String()}) // strings always encode
	return append(whole[:len(whole)-1], ',')
}

// around reads up to the items. After them it returns io.EOF at the end of the list.
func (l *jsonItems) around(in *input, head *listHead) error {
	s := scanner{in: in}
	another := false
	switch l.at {
	case before:
		s.expect('{')
		another = s.peek() != '}'
	case done:
		return l.end(in)
	default:
		another = s.another('}')
	}
	for another && s.err == nil {
		switch key := s.key(); string(key) {
		case "items":
			s.once(&l.items)
			if s.peek() == '[' {
				s.i++
				l.at, l.first = within, true
				return l.took(&s, head)
			}
			s.null()
		case "rows":
			s.fail()
		case "kind":
			s.stringOrNull(&l.kind)
			l.kindText = string(s.text(l.kind))
		case "apiVersion":
			s.stringOrNull(&l.version)
			l.versionText = string(s.text(l.version))
		case "metadata":
			l.metadata(&s, head)
		default:
			s.skip()
		}
		another = s.another('}')
	}
	if !l.items.set {
		s.fail()
	}
	l.at = done
	if err := l.took(&s, head); err != nil {
		return err
	}
	return l.end(in)
}

// metadata reads the version of the list.
func (l *jsonItems) metadata(s *scanner, head *listHead) {
	if s.peek() == 'n' {
		s.null()
		return
	}
	s.members(func(key []byte) {
		switch string(key) {
		case "resourceVersion":
			s.stringOrNull(&l.revised)
			head.revision = string(s.text(l.revised))
		case "continue":
			s.stringOrNull(&l.more)
			if len(s.text(l.more)) > 0 {
				s.fail()
			}
		default:
			s.skip()
		}
	})
}

// took takes what was read, and stores the kind if that is known.
func (l *jsonItems) took(s *scanner, head *listHead) error {
	if s.err != nil {
		return s.err
	}
	s.in.take(s.i)
	if head.Kind != "" || l.kindText == "" || l.versionText == "" {
		return nil
	}
	return head.setKind(l.versionText + " " + l.kindText)
}

func (l *jsonItems) end(in *input) error {
	for {
		if _, err := trailer(in); err != nil {
			return err
		}
	}
}

func (*jsonItems) event(kind string, object []byte, _ schema.GroupVersionKind) ([]byte, error) {
	out := make([]byte, 0, len(object)+48)
	out = append(out, `{"type":"`+kind+`","object":`...)
	out = append(out, object...)
	return append(out, "}\n"...), nil
}

func (*jsonItems) bookmark(head *listHead) []byte {
	metadata, _ := json.Marshal(map[string]string{"resourceVersion": head.revision}) // strings always encode
	return slices.Concat(typeMeta(head.GroupVersionKind), []byte(`"metadata":`), metadata, []byte("}"))
}

// protoItems reads a list in protobuf.
type protoItems struct {
	begun           bool
	left            uint64 // bytes of the list
	items, metadata protowire.Number
}

func (l *protoItems) next(in *input, head *listHead) (Item, error) {
	if !l.begun {
		if err := l.begin(in, head); err != nil {
			return Item{}, unexpected(err)
		}
		l.begun = true
	}
	for l.left > 0 {
		f, err := in.field(0, 0)
		if err != nil {
			return Item{}, unexpected(err)
		}
		if uint64(f.end) > l.left {
			return Item{}, ErrForm
		}
		l.left -= uint64(f.end)
		if f.number != l.items && f.number != l.metadata {
			in.take(f.end)
			continue
		}
		value, err := in.bytes(f)
		if err != nil {
			return Item{}, err
		}
		in.take(f.end)
		if f.number == l.metadata {
			if err := l.version(value, head); err != nil {
				return Item{}, err
			}
			continue
		}
		item := Item{object: value}
		return item, rawKey(value, &item.Key)
	}
	return Item{}, protoEnd(in)
}

// begin reads up to the fields of the list.
func (l *protoItems) begin(in *input, head *listHead) error {
	if err := in.need(len(magic)); err != nil {
		return err
	}
	if string(in.b[:len(magic)]) != magic {
		return ErrForm
	}
	in.take(len(magic))
	for {
		f, err := in.field(0, unknownRaw)
		if err != nil {
			return err
		}
		switch f.number {
		case unknownTypeMeta:
			value, err := in.bytes(f)
			if err != nil {
				return err
			}
			kind, err := kindOf(value)
			if err != nil {
				return err
			}
			if err := head.setKind(kind); err != nil {
				return err
			}
			if l.items, l.metadata = listItems, listMetadata; kind == partialListV1beta1 {
				l.items, l.metadata = l.metadata, l.items
			}
			in.take(f.end)
		case unknownRaw:
			if f.kind != protowire.BytesType || head.Kind == "" {
				return ErrForm
			}
			l.left = f.length
			in.take(f.value)
			return nil
		default:
			in.take(f.end)
		}
	}
}

func (l *protoItems) version(metadata []byte, head *listHead) error {
	return eachBytes(metadata, 1<<listMetaRevision|1<<listMetaContinue, func(number protowire.Number, value []byte) error {
		switch {
		case number == listMetaRevision:
			head.revision = string(value)
		case len(value) > 0:
			return ErrForm
		}
		return nil
	})
}

// protoEnd reads what follows the list, and returns io.EOF.
func protoEnd(in *input) error {
	for {
		f, err := in.field(0, 0)
		switch {
		case err != nil:
			return err
		case f.number == unknownTypeMeta || f.number == unknownRaw:
			return ErrForm
		}
		in.take(f.end)
	}
}

func (*protoItems) event(kind string, object []byte, of schema.GroupVersionKind) ([]byte, error) {
	envelope := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: of.GroupVersion().String(), Kind: of.Kind}, Raw: object}
	raw, err := envelope.Marshal()
	if err != nil {
		return nil, errors.Join(ErrForm, err)
	}
	event := metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: append([]byte(magic), raw...)}}
	body, err := event.Marshal()
	if err != nil {
		return nil, errors.Join(ErrForm, err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...), nil
}

func (*protoItems) bookmark(head *listHead) []byte {
	revision := protowire.AppendString(protowire.AppendTag(nil, metaRevision, protowire.BytesType), head.revision)
	return protowire.AppendBytes(protowire.AppendTag(nil, objectMetadata, protowire.BytesType), revision)
}
