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
	metaAnnotations          = 12
	mapKey, mapValue         = 1, 2
)

type record struct {
	Holder  string `json:"holderIdentity"`
	Seconds int64  `json:"leaseDurationSeconds"`
}

// Holder reads who holds the lock, and for how long, from an answer about it.
// The holder is "" when nobody does or when that cannot be told.
func Holder(contentType string, body []byte) (holder string, lease time.Duration) {
	media, err := mediaType(contentType)
	if err != nil {
		return "", 0
	}
	var spec record
	var annotation string
	switch media {
	case typeJSON:
		var object struct {
			Metadata struct {
				Annotations map[string]string `json:"annotations"`
			} `json:"metadata"`
			Spec record `json:"spec"`
		}
		if json.Unmarshal(body, &object) != nil {
			return "", 0
		}
		spec, annotation = object.Spec, object.Metadata.Annotations[leaderAnnotation]
	case typeProtobuf:
		spec, annotation = protoRecord(body)
	}
	if spec.Holder == "" && annotation != "" {
		if json.Unmarshal([]byte(annotation), &spec) != nil {
			return "", 0
		}
	}
	return spec.Holder, time.Duration(spec.Seconds) * time.Second
}

func protoRecord(body []byte) (spec record, annotation string) {
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
		m := message{objectMetadata: message{metaAnnotations: onAnnotation}.edit}
		if kind == "Lease" {
			m[leaseSpec] = onSpec
		}
		return m
	})
	if err != nil {
		return record{}, ""
	}
	return spec, annotation
}
