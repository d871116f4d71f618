package lock

import (
	"encoding/json"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// leaderAnnotation holds the election record of ConfigMap and Endpoints locks.
const leaderAnnotation = "control-plane.alpha.kubernetes.io/leader"

// Field numbers of coordination/v1's and meta/v1's generated.proto.
const (
	leaseSpec                = 2
	specHolder, specDuration = 1, 2
	specAcquired             = 3
	specTransitions          = 5
	metaResourceVersion      = 6
	metaAnnotations          = 12
	mapKey, mapValue         = 1, 2
)

// record is a leader-election record: a Lease's spec, or the annotation's text.
type record struct {
	Holder string `json:"holderIdentity"`
	// Nil if absent.
	Seconds     *int64  `json:"leaseDurationSeconds"`
	Acquired    *string `json:"acquireTime"`
	Transitions *int64  `json:"leaseTransitions"`
}

// seconds returns the duration of the lease; 0 if the record has none.
func (r record) seconds() int64 {
	if r.Seconds == nil {
		return 0
	}
	return *r.Seconds
}

// object is the part of a lock that this package reads.
type object struct {
	Metadata struct {
		Name            string            `json:"name"`
		ResourceVersion string            `json:"resourceVersion"`
		Annotations     map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec record `json:"spec"`
}

// annotated returns the record in the annotation, and reports whether there is one.
func (o *object) annotated() (r record, ok bool) {
	text := o.Metadata.Annotations[leaderAnnotation]
	return r, text != "" && json.Unmarshal([]byte(text), &r) == nil
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

// Holder reads the state of the lock from an answer about it.
func Holder(contentType string, body []byte) Held {
	media, err := mediaType(contentType)
	if err != nil {
		return Held{}
	}
	var o object
	switch media {
	case typeJSON:
		if json.Unmarshal(body, &o) != nil {
			return Held{}
		}
	case typeProtobuf:
		o = protoObject(body)
	}
	spec := o.Spec
	if spec.Holder == "" {
		if annotated, ok := o.annotated(); ok {
			spec = annotated
		}
	}
	return Held{Holder: spec.Holder, For: time.Duration(spec.seconds()) * time.Second, Version: o.Metadata.ResourceVersion}
}

// protoObject reads an object in an envelope. It returns the zero object if body is none.
func protoObject(body []byte) (o object) {
	name := text(func(s string) (string, bool) { o.Metadata.Name = s; return s, false })
	version := text(func(s string) (string, bool) { o.Metadata.ResourceVersion = s; return s, false })
	_, _, err := editProto(body, func(kind string) message {
		m := message{objectMetadata: message{
			metaName: name, metaResourceVersion: version, metaAnnotations: o.protoAnnotation,
		}.edit}
		if kind == "Lease" {
			m[leaseSpec] = o.Spec.protoSpec
		}
		return m
	})
	if err != nil {
		return object{}
	}
	return o
}

// protoAnnotation is a field that reads one entry of the annotations.
func (o *object) protoAnnotation(b []byte) ([]byte, bool, error) {
	var key, value string
	_, _, err := message{
		mapKey:   text(func(s string) (string, bool) { key = s; return s, false }),
		mapValue: text(func(s string) (string, bool) { value = s; return s, false }),
	}.edit(b)
	if key == leaderAnnotation {
		o.Metadata.Annotations = map[string]string{key: value}
	}
	return nil, false, err
}

// protoSpec is a field that reads a Lease's spec.
func (r *record) protoSpec(b []byte) ([]byte, bool, error) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeField(b)
		if n < 0 {
			return nil, false, errProto
		}
		_, _, tag := protowire.ConsumeTag(b)
		switch {
		case num == specHolder && typ == protowire.BytesType:
			v, _ := protowire.ConsumeBytes(b[tag:n])
			r.Holder = string(v)
		case num == specDuration && typ == protowire.VarintType:
			r.Seconds = int32Field(b[tag:n])
		case num == specAcquired && typ == protowire.BytesType:
			r.Acquired = new(string) // the time itself is not needed
		case num == specTransitions && typ == protowire.VarintType:
			r.Transitions = int32Field(b[tag:n])
		}
		b = b[n:]
	}
	return nil, false, nil
}

func int32Field(b []byte) *int64 {
	v, _ := protowire.ConsumeVarint(b)
	n := int64(int32(v))
	return &n
}
