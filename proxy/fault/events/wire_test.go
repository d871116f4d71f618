package events_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
)

const (
	jsonType  = "application/json"
	protoType = "application/vnd.kubernetes.protobuf"
)

var codecs = func() serializer.CodecFactory {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, metav1.AddMetaToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return serializer.NewCodecFactory(s)
}()

func infoOf(media string) runtime.SerializerInfo {
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
	if !ok {
		panic(media)
	}
	return info
}

// config is an object as of a version.
func config(name, version string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, UID: types.UID("uid-of-" + name), ResourceVersion: version,
	}}
}

func wire(media string, kind watch.EventType, o runtime.Object) []byte {
	info := infoOf(media)
	v1 := schema.GroupVersion{Version: "v1"}
	raw, err := runtime.Encode(codecs.EncoderForVersion(info.Serializer, v1), o)
	if err != nil {
		panic(err)
	}
	var out bytes.Buffer
	event := &metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}}
	encoder := codecs.EncoderForVersion(info.StreamSerializer.Serializer, v1)
	if err := streaming.NewEncoder(info.StreamSerializer.NewFrameWriter(&out), encoder).Encode(event); err != nil {
		panic(err)
	}
	return out.Bytes()
}

// decoder reads a watch as client-go does.
func decoder(media string, r readCloser) *restwatch.Decoder {
	info := infoOf(media)
	frames := streaming.NewDecoder(info.StreamSerializer.NewFrameReader(r),
		codecs.WithoutConversion().DecoderToVersion(info.StreamSerializer.Serializer, schema.GroupVersion{Version: "v1"}))
	return restwatch.NewDecoder(frames, info.Serializer)
}

// read is one event, as "KIND name/version", or the error's text.
func read(t testing.TB, d *restwatch.Decoder) string {
	t.Helper()
	kind, o, err := d.Decode()
	if err != nil {
		return err.Error()
	}
	if s, ok := o.(*metav1.Status); ok {
		require.Equal(t, metav1.StatusReasonExpired, s.Reason)
		require.Equal(t, int32(410), s.Code)
		return string(kind)
	}
	c := o.(*corev1.ConfigMap)
	return string(kind) + " " + c.Name + "/" + c.ResourceVersion
}
