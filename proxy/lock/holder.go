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
	metaResourceVersion      = 6
	metaAnnotations          = 12
	mapKey, mapValue         = 1, 2
)

type record struct {
	Holder  string `json:"holderIdentity"`
	Seconds int64  `json:"leaseDurationSeconds"`
}

// Held is what an answer about the lock tells of it.
type Held struct {
	// Holder is "" when nobody holds it or when that cannot be told.
	Holder string
	// For is how long he does without another write.
	For time.Duration
	// Version is the object's resourceVersion.
	Version string
}

// Holder reads who holds the lock from an answer about it.
func Holder(contentType string, body []byte) Held {
	media, err := mediaType(contentType)
	if err != nil {
		return Held{}
	}
	var spec record
	var annotation, version string
	switch media {
	case typeJSON:
		var object struct {
			Metadata struct {
				ResourceVersion string            `json:"resourceVersion"`
				Annotations     map[string]string `json:"annotations"`
			} `json:"metadata"`
			Spec record `json:"spec"`
		}
		if json.Unmarshal(body, &object) != nil {
			return Held{}
		}
		spec, annotation, version = object.Spec, object.Metadata.Annotations[leaderAnnotation], object.Metadata.ResourceVersion
	case typeProtobuf:
		spec, annotation, version = protoRecord(body)
	}
	if spec.Holder == "" && annotation != "" {
		if json.Unmarshal([]byte(annotation), &spec) != nil {
			return Held{}
		}
	}
	return Held{Holder: spec.Holder, For: time.Duration(spec.Seconds) * time.Second, Version: version}
}

func protoRecord(body []byte) (spec record, annotation, version string) {
	onSpec := func(b []byte) ([]byte, bool, error) {
		for len(b) > 0 {
			num, typ, n := protowire.ConsumeField(b)
			if n < 0 {
				return nil, false, errProto
			}
			_, _, tag := protowire.ConsumeTag(b)
			switch {
			case num == specHolder && typ == protowire.BytesType:
				v, _ := protowire.ConsumeBytes(b[tag:n])
				spec.Holder = string(v)
			case num == specDuration && typ == protowire.VarintType:
				v, _ := protowire.ConsumeVarint(b[tag:n])
				spec.Seconds = int64(int32(v))
			}
			b = b[n:]
		}
		return nil, false, nil
	}
	onAnnotation := func(b []byte) ([]byte, bool, error) {
		var key, value string
		_, _, err := message{
			mapKey:   text(func(s string) (string, bool) { key = s; return s, false }),
			mapValue: text(func(s string) (string, bool) { value = s; return s, false }),
		}.edit(b)
		if key == leaderAnnotation {
			annotation = value
		}
		return nil, false, err
	}
	_, _, err := editProto(body, func(kind string) message {
		m := message{objectMetadata: message{
			metaResourceVersion: text(func(s string) (string, bool) { version = s; return s, false }),
			metaAnnotations:     onAnnotation,
		}.edit}
		if kind == "Lease" {
			m[leaseSpec] = onSpec
		}
		return m
	})
	if err != nil {
		return record{}, "", ""
	}
	return spec, annotation, version
}
