package filter_test

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
)

var (
	scheme = func() *runtime.Scheme {
		s := runtime.NewScheme()
		for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, metav1.AddMetaToScheme, metav1beta1.AddMetaToScheme} {
			if err := add(s); err != nil {
				panic(err)
			}
		}
		return s
	}()
	codecs = serializer.NewCodecFactory(scheme)
)

func serializerOf(t testing.TB, media string) runtime.SerializerInfo {
	t.Helper()
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
	require.True(t, ok, media)
	return info
}

// encode encodes an object as the apiserver does.
func encode(t testing.TB, media string, o runtime.Object) []byte {
	t.Helper()
	gvks, _, err := scheme.ObjectKinds(o)
	require.NoError(t, err)
	out, err := runtime.Encode(codecs.EncoderForVersion(serializerOf(t, media).Serializer, gvks[0].GroupVersion()), o)
	require.NoError(t, err)
	return out
}

// decode decodes as client-go does.
func decode(media string, b []byte) (runtime.Object, error) {
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
	return runtime.Decode(info.Serializer, b)
}

// event encodes a watch event as the apiserver does.
func event(t testing.TB, media string, kind watch.EventType, o runtime.Object) []byte {
	t.Helper()
	var out bytes.Buffer
	stream := serializerOf(t, media).StreamSerializer
	encoder := codecs.EncoderForVersion(stream.Serializer, schema.GroupVersion{Version: "v1"})
	err := streaming.NewEncoder(stream.NewFrameWriter(&out), encoder).Encode(&metav1.WatchEvent{
		Type:   string(kind),
		Object: runtime.RawExtension{Raw: encode(t, media, o)},
	})
	require.NoError(t, err)
	return out.Bytes()
}

type decoded struct {
	kind   watch.EventType
	object runtime.Object
}

// events decodes a watch as client-go does.
func events(media string, b []byte) (out []decoded, err error) {
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
	stream := info.StreamSerializer
	frames := streaming.NewDecoder(stream.NewFrameReader(io.NopCloser(bytes.NewReader(b))), codecs.WithoutConversion().DecoderToVersion(stream.Serializer, schema.GroupVersion{Version: "v1"}))
	d := restwatch.NewDecoder(frames, info.Serializer)
	for {
		kind, o, err := d.Decode()
		if err != nil {
			return out, err
		}
		out = append(out, decoded{kind, o})
	}
}

func pod(namespace, name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID("uid-" + name), ResourceVersion: "7",
			Labels:      map[string]string{"namespace": "other", "app": "a,b]}"},
			Annotations: map[string]string{"note": "a \"quoted\" \\ {[ brace\u2028 \\\""},
		},
		Spec: corev1.PodSpec{
			NodeName: "node-1",
			Containers: []corev1.Container{{
				Name: "main", Image: "registry.example/app:v1", Args: []string{"--metadata", `{"namespace":"own"}`},
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("100m")}},
			}},
		},
	}
}

// pods returns n pods, a fifth of them in the own namespace.
func pods(n int) *corev1.PodList {
	remaining := int64(9)
	l := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "100", Continue: "more", RemainingItemCount: &remaining}}
	for i := range n {
		namespace := own
		if i%5 != 3 {
			namespace = fmt.Sprintf("other-%d", i%5)
		}
		l.Items = append(l.Items, *pod(namespace, fmt.Sprintf("pod-%d", i)))
	}
	return l
}

func partial(p *corev1.Pod, version string) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/" + version},
		ObjectMeta: p.ObjectMeta,
	}
}

// table is a list as the printers of the apiserver make it.
func table(l *corev1.PodList) *metav1.Table {
	out := &metav1.Table{
		ListMeta:          l.ListMeta,
		ColumnDefinitions: []metav1.TableColumnDefinition{{Name: "Name", Type: "string", Format: "name", Description: "it has rows: [{"}},
	}
	for i := range l.Items {
		p := partial(&l.Items[i], "v1")
		out.Rows = append(out.Rows, metav1.TableRow{Cells: []any{l.Items[i].Name, int64(1)}, Object: runtime.RawExtension{Object: &p}})
	}
	return out
}
