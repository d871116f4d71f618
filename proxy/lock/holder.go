package lock

import (
	"bytes"
	"encoding/json"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/ctrlmesh/ctrlmesh/internal/election"
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
		if json.Unmarshal(body, &o) != nil {
			return Held{}
		}
	case typeProtobuf:
		o = protoObject(body)
	}
	spec := o.held()
	return Held{Holder: spec.Holder, For: time.Duration(ptr.Deref(spec.Seconds, 0)) * time.Second, Version: o.Metadata.ResourceVersion}
}

// protoObject reads an object in an envelope. It returns the zero object if body is none.
func protoObject(body []byte) (o object) {
	raw, ok := bytes.CutPrefix(body, magic)
	var envelope runtime.Unknown
	if !ok || envelope.Unmarshal(raw) != nil {
		return o
	}
	if envelope.Kind != "Lease" {
		var meta metav1.PartialObjectMetadata
		if meta.Unmarshal(envelope.Raw) == nil {
			o.Metadata.Name, o.Metadata.ResourceVersion, o.Metadata.Annotations = meta.Name, meta.ResourceVersion, meta.Annotations
		}
		return o
	}
	var lease coordinationv1.Lease
	if lease.Unmarshal(envelope.Raw) != nil {
		return o
	}
	o.Metadata.Name, o.Metadata.ResourceVersion, o.Metadata.Annotations = lease.Name, lease.ResourceVersion, lease.Annotations
	spec := &lease.Spec
	o.Spec = record{Seconds: widen[election.Seconds](spec.LeaseDurationSeconds), Transitions: widen[int64](spec.LeaseTransitions)}
	if spec.HolderIdentity != nil {
		o.Spec.Holder = *spec.HolderIdentity
	}
	if spec.AcquireTime != nil {
		o.Spec.Acquired = new(string) // the time itself is not needed
	}
	return o
}

func widen[T ~int64](n *int32) *T {
	if n == nil {
		return nil
	}
	return new(T(*n))
}
