package proxy

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/policytest"
)

// mine is an apiserver on which every object is the shard's.
func mine() *recorder {
	return &recorder{then: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"metadata":{"uid":"mine"}}`)
	}}
}

func TestProtobufWriteNamesUidOfItsObject(t *testing.T) {
	t.Parallel()
	api := mine()
	m := newMesh(t, api)
	m.policy(policytest.ByObject("nodes"))
	sent := func(method string, o runtime.Object) runtime.Object {
		require.Equal(t, 200, m.do(method, "/api/v1/nodes/a", string(wire(protoType, o)), "Content-Type", protoType).StatusCode)
		got, err := runtime.Decode(serializerOf(protoType).Serializer, []byte(api.last(t).Body))
		require.NoError(t, err)
		return got
	}
	got := sent("PUT", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.NodeSpec{PodCIDR: "x"}}).(*corev1.Node)
	require.Equal(t, "x", got.Spec.PodCIDR)
	accessor, err := meta.Accessor(got)
	require.NoError(t, err)
	require.Equal(t, "a mine", accessor.GetName()+" "+string(accessor.GetUID()))

	seconds, version := int64(7), "1"
	options := sent("DELETE", &metav1.DeleteOptions{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"}, GracePeriodSeconds: &seconds,
		Preconditions: &metav1.Preconditions{ResourceVersion: &version},
	}).(*metav1.DeleteOptions)
	require.EqualValues(t, 7, *options.GracePeriodSeconds)
	require.Equal(t, "1", *options.Preconditions.ResourceVersion)
	require.Equal(t, types.UID("mine"), *options.Preconditions.UID)

	theirs := &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: "theirs"}}
	require.Equal(t, 403, m.do("PUT", "/api/v1/nodes/a", string(wire(protoType, theirs)), "Content-Type", protoType).StatusCode)
}

// Who lets the body wait does not choose the moment between the look and the write.
func TestUidIsReadAfterTheBody(t *testing.T) {
	t.Parallel()
	looked := make(chan struct{}, 2)
	m := newMesh(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		looked <- struct{}{}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"metadata":{"uid":"theirs"}}`)
	}))
	m.policy(policytest.ByObject("nodes"))
	body, more := io.Pipe()
	r, err := http.NewRequest("PATCH", "https://kubernetes.default.svc/api/v1/nodes/a", body)
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json-patch+json")
	code := make(chan int, 1)
	c := m.client(true)
	go func() {
		resp, err := c.Do(r)
		if err != nil {
			code <- 0
			return
		}
		_ = resp.Body.Close()
		code <- resp.StatusCode
	}()
	_, err = io.WriteString(more, "[")
	require.NoError(t, err)
	require.Empty(t, looked)
	_, err = io.WriteString(more, "]")
	require.NoError(t, err)
	require.Empty(t, looked)
	require.NoError(t, more.Close())
	require.Equal(t, 403, <-code)
	require.Len(t, looked, 1)
}
