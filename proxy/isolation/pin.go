package isolation

import (
	"bytes"
	"encoding/json"
	"mime"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
// resources.
func Pin(verb, contentType string, body []byte, uid string) (named string, pinned []byte) {
	at := inMetadata
	if verb == "delete" {
		at = inPreconditions
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return "", nil // the apiserver refuses it
	}
	switch media {
	case "application/json", "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml":
		return at.json(body, uid)
	case "application/vnd.kubernetes.protobuf":
		return at.protobuf(body, uid)
	}
	return "", nil
}

// json returns the uid that a body names, or, if it names none, the body with one. It
// returns neither for an unexpected body, which the apiserver refuses.
func (p slot) json(body []byte, uid string) (named string, pinned []byte) {
	var outer, inner map[string]json.RawMessage
	if json.Unmarshal(body, &outer) != nil || outer == nil {
		return "", nil
	}
	if raw, ok := outer[p.member]; ok && json.Unmarshal(raw, &inner) != nil {
		return "", nil
	}
	if raw, ok := inner["uid"]; ok && (json.Unmarshal(raw, &named) != nil || named != "") {
		return named, nil
	}
	if inner == nil {
		inner = map[string]json.RawMessage{}
	}
	inner["uid"], _ = json.Marshal(uid) // a string always encodes, and so does what was decoded
	outer[p.member], _ = json.Marshal(inner)
	pinned, _ = json.Marshal(outer)
	return "", pinned
}

// protobuf does the same with the encoding of Kubernetes. A message that occurs twice is
// merged.
func (p slot) protobuf(body []byte, uid string) (named string, pinned []byte) {
	const magic = "k8s\x00"
	raw, ok := bytes.CutPrefix(body, []byte(magic))
	var envelope runtime.Unknown
	if !ok || envelope.Unmarshal(raw) != nil {
		return "", nil
	}
	switch p {
	case inPreconditions:
		var options metav1.DeleteOptions
		if options.Unmarshal(envelope.Raw) != nil {
			return "", nil
		}
		if of := options.Preconditions; of != nil && of.UID != nil {
			named = string(*of.UID)
		}
	case inMetadata:
		var object metav1.PartialObjectMetadata
		if object.Unmarshal(envelope.Raw) != nil {
			return "", nil
		}
		named = string(object.UID)
	}
	if named != "" {
		return named, nil
	}
	inner := protowire.AppendString(protowire.AppendTag(nil, p.number, protowire.BytesType), uid)
	envelope.Raw = protowire.AppendBytes(protowire.AppendTag(envelope.Raw, p.outer, protowire.BytesType), inner)
	out, err := envelope.Marshal()
	if err != nil {
		return "", nil
	}
	return "", append([]byte(magic), out...)
}
