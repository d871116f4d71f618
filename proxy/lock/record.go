package lock

import (
	"bytes"
	"encoding/json"
	"strings"

	"sigs.k8s.io/yaml"
)

// Record is a leader-election record in the body of a request or an answer.
type Record struct {
	// Name of the object; empty if the body has none.
	Name string
	// Holder is the identity of the holder.
	Holder string
}

// FindRecord looks for a leader-election record that names a holder: in the spec of
// a Lease, or in the annotation of a ConfigMap or Endpoints. Leases with another
// purpose, such as the heartbeats of nodes, lack the time of acquisition and the number
// of transitions. A patch need not say the latter, nor the duration: it says what it
// changes.
func FindRecord(resource, contentType string, body []byte) (Record, bool) {
	media, err := mediaType(contentType)
	if err != nil || resource != "leases" && !bytes.Contains(body, annotationDomain) {
		return Record{}, false
	}
	o, patch, ok := readObject(media, body)
	if !ok {
		return Record{}, false
	}
	r := o.Spec
	if resource != "leases" {
		if r, ok = o.annotated(); !ok {
			return Record{}, false
		}
	} else if r.Acquired == nil || !patch && (r.Seconds == nil || r.Transitions == nil) {
		return Record{}, false
	}
	return Record{Name: o.Metadata.Name, Holder: r.Holder}, r.Holder != ""
}

// ReadRequest returns the holder and the resourceVersion that the body of a write names. Both may
// be empty: without a version, the write applies to whatever version there is.
func ReadRequest(contentType string, body []byte) (holder, version string) {
	media, err := mediaType(contentType)
	if err != nil {
		return "", ""
	}
	o, _, ok := readObject(media, body)
	if !ok {
		return "", ""
	}
	return o.held().Holder, o.Metadata.ResourceVersion
}

// annotationDomain occurs in every body with the annotation, also where a JSON pointer
// escapes the rest of its key.
var annotationDomain = []byte("control-plane.alpha.kubernetes.io")

// readObject reads the lock from an object or a patch.
func readObject(media string, body []byte) (o object, patch, ok bool) {
	switch media {
	case typeProtobuf:
		return protoObject(body), false, true
	case typePatch:
		body, patch = patched(body), true
	case typeMerge, typeStrat:
		patch = true
	case typeYAML, typeApply:
		patch = media == typeApply
		if !json.Valid(body) { // JSON is YAML too
			var err error
			if body, err = yaml.YAMLToJSON(body); err != nil {
				return o, patch, false
			}
		}
	case typeJSON:
	default:
		return o, false, false
	}
	return o, patch, json.Unmarshal(body, &o) == nil
}

// maxPointer is the maximum depth of the fields that are read.
const maxPointer = 3

// patched returns an object with the values that a JSON patch adds or replaces.
func patched(body []byte) []byte {
	var ops []struct {
		Op    string          `json:"op"`
		Path  string          `json:"path"`
		Value json.RawMessage `json:"value"`
	}
	if json.Unmarshal(body, &ops) != nil {
		return nil
	}
	root := map[string]any{}
	for _, op := range ops {
		if op.Op != "add" && op.Op != "replace" {
			continue
		}
		var value any
		if json.Unmarshal(op.Value, &value) != nil {
			continue
		}
		if op.Path == "" {
			root, _ = value.(map[string]any)
			continue
		}
		keys := strings.Split(op.Path, "/")[1:]
		if len(keys) > 0 && len(keys) <= maxPointer {
			put(root, keys, value)
		}
	}
	out, _ := json.Marshal(root) // decoded values always encode
	return out
}

var unescape = strings.NewReplacer("~1", "/", "~0", "~")

// put sets the value at a path of keys. It replaces values on the path that are not objects
// by objects, and does nothing if in is nil.
func put(in map[string]any, keys []string, value any) {
	if in == nil {
		return
	}
	key := unescape.Replace(keys[0])
	if len(keys) == 1 {
		in[key] = value
		return
	}
	next, isObject := in[key].(map[string]any)
	if !isObject {
		next = map[string]any{}
		in[key] = next
	}
	put(next, keys[1:], value)
}
