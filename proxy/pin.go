package proxy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"mime"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// slot is where in a body the uid is said that the request is for: in a member of
// a member, in JSON and in protobuf.
type slot struct {
	member        string
	outer, number protowire.Number
}

var (
	inMetadata      = slot{"metadata", 1, 5}
	inPreconditions = slot{"preconditions", 2, 1} // of DeleteOptions
)

// pin makes a write one of the very object that was looked at: the apiserver refuses
// it when the name is another's by then. One that names the object of another shard
// is met as one for that.
//
// What has no place for a uid is not pinned: a JSON patch, an apply in YAML, and
// subresources other than the status. Nor, by the apiserver, are patches of a status
// where that drops all metadata, as those of custom resources.
func (s *fenceStage) pin(x *exchange, body []byte, uid string) *outcome {
	at := inMetadata
	switch verb := x.req.info.Verb; {
	case verb == "delete" && x.req.info.Subresource == "":
		at = inPreconditions
		if len(bytes.TrimSpace(body)) == 0 {
			body = []byte(`{"kind":"DeleteOptions","apiVersion":"v1"}`)
			x.out.set("Content-Type", typeJSON)
		}
	case (verb == "update" || verb == "patch") && (x.req.info.Subresource == "" || x.req.info.Subresource == "status"):
	default:
		return nil
	}
	media, _, err := mime.ParseMediaType(cmp.Or(x.out.header.get("Content-Type"), typeJSON))
	if err != nil {
		return nil // for the apiserver to refuse
	}
	var said string
	var pinned []byte
	switch media {
	case typeJSON, "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml":
		said, pinned = at.json(body, uid)
	case typeProtobuf:
		said, pinned = at.protobuf(body, uid)
	}
	switch {
	case said != "" && !s.owned.Owns(said):
		return s.encounter(x, "object "+x.req.info.Name, said)
	case pinned != nil:
		x.out.replace(pinned)
	}
	return nil
}

// json returns the uid that a body says, or, if it says none, the body with one. It
// returns neither of what is not as expected: that is for the apiserver to refuse.
func (p slot) json(body []byte, uid string) (said string, pinned []byte) {
	var outer, inner map[string]json.RawMessage
	if json.Unmarshal(body, &outer) != nil || outer == nil {
		return "", nil
	}
	if raw, ok := outer[p.member]; ok && json.Unmarshal(raw, &inner) != nil {
		return "", nil
	}
	if raw, ok := inner["uid"]; ok && (json.Unmarshal(raw, &said) != nil || said != "") {
		return said, nil
	}
	if inner == nil {
		inner = map[string]json.RawMessage{}
	}
	var err error
	if inner["uid"], err = json.Marshal(uid); err != nil {
		return "", nil
	}
	if outer[p.member], err = json.Marshal(inner); err != nil {
		return "", nil
	}
	pinned, err = json.Marshal(outer)
	if err != nil {
		return "", nil
	}
	return "", pinned
}

// protobuf does the same with the encoding of Kubernetes. A message that comes twice
// is one of both.
func (p slot) protobuf(body []byte, uid string) (said string, pinned []byte) {
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
			said = string(*of.UID)
		}
	case inMetadata:
		var object metav1.PartialObjectMetadata
		if object.Unmarshal(envelope.Raw) != nil {
			return "", nil
		}
		said = string(object.UID)
	}
	if said != "" {
		return said, nil
	}
	inner := protowire.AppendString(protowire.AppendTag(nil, p.number, protowire.BytesType), uid)
	envelope.Raw = protowire.AppendBytes(protowire.AppendTag(envelope.Raw, p.outer, protowire.BytesType), inner)
	out, err := envelope.Marshal()
	if err != nil {
		return "", nil
	}
	return "", append([]byte(magic), out...)
}
