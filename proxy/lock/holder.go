package lock

import (
	"encoding/json"
	"time"

	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"

	"github.com/ctrlmesh/ctrlmesh/internal/election"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

// leaderAnnotation holds the election record of ConfigMap and Endpoints locks.
const leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"

// record is a leader-election record: a Lease's spec, or the annotation's text.
type record struct {
	Holder string `json:"holderIdentity"`
	// Nil if absent.
	Seconds     *election.Seconds `json:"leaseDurationSeconds"`
	Acquired    *string           `json:"acquireTime"`
	Transitions *int64            `json:"leaseTransitions"`
}

// object is the part of a lock that this package reads, as the apiserver does: the case of
// members counts.
type object struct {
	Metadata last[metadata] `json:"metadata"`
	Spec     record         `json:"spec"`
}

type metadata struct {
	Name            string       `json:"name"`
	ResourceVersion last[string] `json:"resourceVersion"`
	Annotations     struct {
		Leader string `json:"control-plane.alpha.kubernetes.io/leader"`
	} `json:"annotations"`
}

// last is a member of which the last occurrence counts, null included, as in a patch. In an
// object the apiserver merges all occurrences, so a version may be missed there. Then the write
// counts as unconditional, which is safe.
type last[T any] struct{ Value T }

// UnmarshalJSON implements json.Unmarshaler.
func (l *last[T]) UnmarshalJSON(b []byte) error {
	var fresh T
	if err := kjson.UnmarshalCaseSensitivePreserveInts(b, &fresh); err != nil {
		return err
	}
	l.Value = fresh
	return nil
}

// annotated returns the record in the annotation, and reports whether there is one.
func (o *object) annotated() (r record, ok bool) {
	text := o.Metadata.Value.Annotations.Leader
	return r, text != "" && json.Unmarshal([]byte(text), &r) == nil // case does not count, as in client-go
}

// held returns the record that names a holder: that of the spec, or else of the annotation.
func (o *object) held() record {
	if o.Spec.Holder == "" {
		if annotated, ok := o.annotated(); ok {
			return annotated
		}
	}
	return o.Spec
}

// Held is the state of a lock, read from an answer about it.
type Held struct {
	// Holder is empty if the lock has no holder, or if the holder is unknown.
	Holder string
	// For is how long the holder keeps the lock without renewing it.
	For time.Duration
	// Version is the object's resourceVersion.
	Version string
}

// ReadHeld reads the state of the lock from an answer about it.
func ReadHeld(contentType string, body []byte) Held {
	media, err := mediaType(contentType)
	if err != nil {
		return Held{}
	}
	var o object
	switch media {
	case typeJSON:
		err = kjson.UnmarshalCaseSensitivePreserveInts(body, &o)
	case typeProtobuf:
		o, err = protoObject(body)
	}
	if err != nil {
		return Held{}
	}
	spec := o.held()
	return Held{Holder: spec.Holder, For: time.Duration(ptr.Deref(spec.Seconds, 0)) * time.Second, Version: o.Metadata.Value.ResourceVersion.Value}
}

// protoObject reads an object in an envelope.
func protoObject(body []byte) (o object, err error) {
	envelope, err := fields.Open(body)
	if err != nil {
		return o, err
	}
	return o, fields.Walk(envelope.Raw.Value, func(f *fields.Field) error {
		read := o.Metadata.Value.read
		switch {
		case f.Number == objectMetadata:
		case f.Number == leaseSpec && envelope.Kind == "Lease":
			read = o.Spec.read
		default:
			return nil
		}
		message, err := f.Bytes()
		if err != nil {
			return err
		}
		return fields.Walk(message, read)
	})
}

// read reads one field of an ObjectMeta.
func (m *metadata) read(f *fields.Field) error {
	switch f.Number {
	case metaName:
		m.Name = string(f.Value)
	case metaVersion:
		m.ResourceVersion.Value = string(f.Value)
	case metaAnnotations:
		var key, value string
		err := fields.Walk(f.Value, func(f *fields.Field) error {
			switch f.Number {
			case entryKey:
				key = string(f.Value)
			case entryValue:
				value = string(f.Value)
			}
			return nil
		})
		if key == leaderAnnotation {
			m.Annotations.Leader = value
		}
		return err
	}
	return nil
}

// read reads one field of a LeaseSpec.
func (r *record) read(f *fields.Field) error {
	switch f.Number {
	case specHolder:
		r.Holder = string(f.Value)
	case specSeconds:
		seconds, err := f.Varint()
		r.Seconds = new(election.Seconds(int32(seconds)))
		return err
	case specAcquired:
		r.Acquired = new(string) // the time itself is not needed
	case specTransitions:
		transitions, err := f.Varint()
		r.Transitions = new(int64(int32(transitions)))
		return err
	}
	return nil
}
