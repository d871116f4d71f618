package events

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// expired returns an ERROR event with status 410, as the apiserver sends it when it does
// not have the events since a version any more.
func expired(protobuf bool) []byte {
	status := metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure,
		Message:  "ctrlmesh: injected fault: the resource version is too old: list again",
		Reason:   metav1.StatusReasonExpired,
		Code:     http.StatusGone,
	}
	encode := inJSON
	if protobuf {
		encode = inProtobuf
	}
	out, err := encode(&status)
	if err != nil {
		panic(fmt.Sprintf("events: %v", err)) // a Status always encodes
	}
	return out
}

func inJSON(s *metav1.Status) ([]byte, error) {
	object, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	out, err := json.Marshal(metav1.WatchEvent{Type: string(watch.Error), Object: runtime.RawExtension{Raw: object}})
	return append(out, '\n'), err
}

func inProtobuf(s *metav1.Status) ([]byte, error) {
	raw, err := s.Marshal()
	if err != nil {
		return nil, err
	}
	object, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: s.APIVersion, Kind: s.Kind}, Raw: raw}).Marshal()
	if err != nil {
		return nil, err
	}
	event := metav1.WatchEvent{Type: string(watch.Error), Object: runtime.RawExtension{Raw: append([]byte("k8s\x00"), object...)}}
	out, err := event.Marshal()
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(out))), out...), err
}
