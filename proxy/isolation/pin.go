package isolation

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

// slot is where a body names the uid that the request is for: a member of a member, in
// JSON and in protobuf.
type slot struct {
	member        string
	outer, number protowire.Number
}

var (
	inMetadata      = slot{"metadata", 1, 5}
	inPreconditions = slot{"preconditions", 2, 1} // of DeleteOptions
)

// Pin returns the body of a write with the uid of the object that it is for, so that the
// apiserver refuses the write if the name has become another object's; pinned is nil if
// the body is to be sent as it is. If the body names a uid itself, Pin returns that.
//
// Bodies without a place for a uid are not pinned: a JSON patch, an apply in YAML. Nor
// does the apiserver read it in a patch of a status that drops all metadata, as of custom
// resources. Pin fails if it cannot read a body, which the apiserver may read differently.
func Pin(verb, contentType string, body []byte, uid string) (named string, pinned []byte, err error) {
	at := inMetadata
	if verb == "delete" {
		at = inPreconditions
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return "", nil, nil // the apiserver refuses it
	}
	switch media {
	case "application/apply-patch+yaml":
		if !json.Valid(body) {
			return "", nil, nil
		}
		return at.json(body, uid)
	case "application/json", "application/merge-patch+json", "application/strategic-merge-patch+json":
		return at.json(body, uid)
	case "application/vnd.kubernetes.protobuf":
		return at.protobuf(body, uid)
	}
	return "", nil, nil
}

// errJSON means that a body has no place for a uid where there must be one.
var errJSON = errors.New("the body is not a JSON object")

// json returns the uid that a body names, or, if it names none, the body with one. If a member
// occurs twice, readers may take the last one or merge both. So each gets a uid.
func (p slot) json(body []byte, uid string) (named string, pinned []byte, err error) {
	if !json.Valid(body) {
		return "", nil, errJSON
	}
	quoted, _ := json.Marshal(uid) // a string always encodes
	object := fmt.Appendf(nil, `{"uid":%s}`, quoted)
	edit, found := fields.NewEdit(body), false
	n, ok := fields.Members(body, func(outer fields.Member) {
		if string(outer.Key) != p.member {
			return
		}
		found = true
		if string(outer.Value) == "null" {
			named = ""
			edit.Replace(outer.From, outer.To, object)
			return
		}
		has := false
		n, ok := fields.Members(outer.Value, func(inner fields.Member) {
			if string(inner.Key) != "uid" {
				return
			}
			has, named = true, ""
			if json.Unmarshal(inner.Value, &named) != nil {
				err = errJSON
			}
			if named == "" {
				edit.Replace(outer.From+inner.From, outer.From+inner.To, quoted)
			}
		})
		switch {
		case !ok:
			err = errJSON
		case !has:
			named = ""
			insert(edit, outer.From+1, object[1:len(object)-1], n)
		}
	})
	switch {
	case err != nil || !ok:
		return "", nil, errJSON
	case !found:
		insert(edit, bytes.IndexByte(body, '{')+1, fmt.Appendf(nil, "%q:%s", p.member, object), n)
	case named != "": // the last one counts
		return named, nil, nil
	}
	pinned, _ = edit.Result()
	return "", pinned, nil
}

// insert adds a member at the beginning of an object that has n others.
func insert(edit *fields.Edit, at int, member []byte, n int) {
	if n > 0 {
		member = append(slices.Clip(member), ',')
	}
	edit.Replace(at, at, member)
}

// protobuf does the same with the encoding of Kubernetes. A message that occurs twice is
// merged.
func (p slot) protobuf(body []byte, uid string) (named string, pinned []byte, err error) {
	envelope, err := fields.Open(body)
	if err != nil {
		return "", nil, err
	}
	err = fields.Walk(envelope.Raw.Value, func(outer *fields.Field) error {
		if outer.Number != p.outer {
			return nil
		}
		message, err := outer.Bytes()
		if err != nil {
			return err
		}
		return fields.Walk(message, func(inner *fields.Field) error {
			if inner.Number == p.number {
				named = string(inner.Value)
			}
			return nil
		})
	})
	if err != nil || named != "" {
		return named, nil, err
	}
	inner := protowire.AppendString(protowire.AppendTag(nil, p.number, protowire.BytesType), uid)
	return "", envelope.Append(p.outer, inner), nil
}
