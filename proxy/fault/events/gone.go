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
	event := metav1.WatchEvent{Type: string(watch.Error)}
	if !protobuf {
		event.Object.Raw = encoded(json.Marshal(&status))
		return append(encoded(json.Marshal(event)), '\n')
	}
	object := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Status"}, Raw: encoded(status.Marshal())}
	event.Object.Raw = append([]byte("k8s\x00"), encoded(object.Marshal())...)
	out := encoded(event.Marshal())
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(out))), out...)
}

func encoded(out []byte, err error) []byte {
	if err != nil {
		panic(fmt.Sprintf("events: %v", err)) // a Status always encodes
	}
	return out
}
