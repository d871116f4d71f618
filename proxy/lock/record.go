package lock

import (
	"bytes"
	"errors"
	"strings"

	kjson "sigs.k8s.io/json"
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
// changes. The error is ErrYAML if the body is not read; an invalid body has no record.
func FindRecord(resource, contentType string, body []byte) (r Record, found bool, err error) {
	if resource != "leases" && !bytes.Contains(body, annotationDomain) {
		return Record{}, false, nil
	}
	o, patch, err := readObject(contentType, body)
	switch {
	case errors.Is(err, ErrYAML):
		return Record{}, false, ErrYAML
	case err != nil:
		return Record{}, false, nil
	}
	elected := o.Spec
	if resource != "leases" {
		elected, found = o.annotated()
	} else {
		found = elected.Acquired != nil && (patch || elected.Seconds != nil && elected.Transitions != nil)
	}
	return Record{Name: o.Metadata.Value.Name, Holder: elected.Holder}, found && elected.Holder != "", nil
}

// ReadRequest returns the holder and the resourceVersion that the body of a write names. Both may
// be empty: without a version, the write applies to whatever version there is.
func ReadRequest(contentType string, body []byte) (holder, version string) {
	o, _, err := readObject(contentType, body)
	if err != nil {
		return "", ""
	}
	return o.held().Holder, o.Metadata.Value.ResourceVersion.Value
}

// annotationDomain occurs in every body with the annotation, also where a JSON pointer
// escapes the rest of its key.
var annotationDomain = []byte("control-plane.alpha.kubernetes.io")

// readObject reads the lock from an object or a patch.
func readObject(contentType string, body []byte) (o object, patch bool, err error) {
	media, err := mediaType(contentType)
	if err != nil {
		return o, false, err
	}
	switch media {
	case typeProtobuf:
		o, err = protoObject(body)
		return o, false, err
	case typePatch:
		return o, true, o.patch(body)
	case typeMerge, typeStrat:
		patch = true
	case typeYAML, typeApply:
		patch = media == typeApply
		if body, err = yamlToJSON(body); err != nil {
			return o, patch, err
		}
	case typeJSON:
	default:
		return o, false, ErrUnsupported
	}
	return o, patch, kjson.UnmarshalCaseSensitivePreserveInts(body, &o)
}

// patch reads the values that a JSON patch adds or replaces. What it moves or copies is
// unknown, and read as absent.
func (o *object) patch(body []byte) error {
	return operations(body, func(op operation) error {
		switch op.Op {
		case "test":
		case "add", "replace":
			o.set(op.Path, op.Value)
		default:
			o.set(op.From, nil)
			o.set(op.Path, nil)
		}
		return nil
	})
}

// escapedAnnotation is leaderAnnotation in a path of a JSON patch.
const escapedAnnotation = "control-plane.alpha.kubernetes.io~1leader"

// set sets what is at a path of a JSON patch to a value; nil: to none.
func (o *object) set(path string, value []byte) {
	// Like the apiserver, ignore what comes before the first slash.
	_, path, below := strings.Cut(path, "/")
	metadata := &o.Metadata.Value
	switch {
	case !below:
		read(value, o)
	case path == "metadata":
		read(value, &o.Metadata)
	case path == "metadata/name":
		read(value, &metadata.Name)
	case path == "metadata/resourceVersion":
		read(value, &metadata.ResourceVersion)
	case path == "metadata/annotations":
		read(value, &metadata.Annotations)
	case path == "metadata/annotations/"+escapedAnnotation:
		read(value, &metadata.Annotations.Leader)
	case path == "spec":
		read(value, &o.Spec)
	case path == "spec/holderIdentity":
		read(value, &o.Spec.Holder)
	case path == "spec/leaseDurationSeconds":
		read(value, &o.Spec.Seconds)
	case path == "spec/acquireTime":
		read(value, &o.Spec.Acquired)
	case path == "spec/leaseTransitions":
		read(value, &o.Spec.Transitions)
	}
}

// read replaces what is at to by a value in JSON, and by nothing if it is of another type,
// which the apiserver refuses.
func read[T any](value []byte, to *T) {
	var fresh T
	if kjson.UnmarshalCaseSensitivePreserveInts(value, &fresh) != nil {
		fresh = *new(T)
	}
	*to = fresh
}
