package filter_test

import (
	"bytes"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// realPods are as large as those of a cluster: about 3 KiB of JSON.
func realPods(n int) *corev1.PodList {
	l := pods(n)
	for i := range l.Items {
		p := &l.Items[i]
		p.ManagedFields = []metav1.ManagedFieldsEntry{{
			Manager: "kube-controller-manager", Operation: "Update", APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:app":{},"f:pod-template-hash":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"a-b-c\"}":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"main\"}":{".":{},"f:args":{},"f:image":{},"f:imagePullPolicy":{},"f:name":{},"f:resources":{},"f:terminationMessagePath":{}}},"f:dnsPolicy":{},"f:restartPolicy":{}}}`),
		}}
		for j := range 8 {
			p.Spec.Containers[0].Env = append(p.Spec.Containers[0].Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_%d", j), Value: "some value"})
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: "node.kubernetes.io/not-ready", Operator: "Exists", Effect: "NoExecute"})
		}
		for _, c := range []corev1.PodConditionType{"Initialized", "Ready", "ContainersReady", "PodScheduled"} {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: c, Status: "True", LastTransitionTime: metav1.Unix(1e9, 0)})
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Ready: true, Image: "registry.example/app:v1", ImageID: "registry.example/app@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}}
	}
	return l
}

func benchmark(b *testing.B, o filter.Options, body []byte) {
	b.Run("filtered", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		buf := make([]byte, 32<<10)
		for b.Loop() {
			r, err := filter.New(bytes.NewReader(body), keep, o)
			require.NoError(b, err)
			_, err = io.CopyBuffer(onlyWriter{io.Discard}, r, buf)
			require.NoError(b, err)
		}
	})
	b.Run("copied", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		b.ReportAllocs()
		buf := make([]byte, 32<<10)
		for b.Loop() {
			_, err := io.CopyBuffer(onlyWriter{io.Discard}, onlyReader{bytes.NewReader(body)}, buf)
			require.NoError(b, err)
		}
	})
}

// onlyWriter and onlyReader hide io.WriterTo and the like, which connections do not have.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)

// A list of 5,000 pods, of which a fifth stays: filtered, copied, and decoded.
func BenchmarkList(b *testing.B) {
	all := realPods(5000)
	for name, media := range map[string]string{"json": jsonType, "protobuf": protoType} {
		body := encode(b, media, all)
		b.Run(name, func(b *testing.B) {
			benchmark(b, filter.Options{ContentType: media}, body)
			b.Run("decoded", func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					_, err := decode(media, body)
					require.NoError(b, err)
				}
			})
		})
	}
	b.Run("table", func(b *testing.B) {
		benchmark(b, filter.Options{ContentType: jsonType}, encode(b, jsonType, table(all)))
	})
}

func BenchmarkWatch(b *testing.B) {
	all := realPods(100)
	for name, media := range map[string]string{"json": jsonType, "protobuf": protoType} {
		var body []byte
		for i := range all.Items {
			body = append(body, event(b, media, watch.Modified, runtime.Object(&all.Items[i]))...)
		}
		b.Run(name, func(b *testing.B) { benchmark(b, filter.Options{ContentType: media, Watch: true}, body) })
	}
}
