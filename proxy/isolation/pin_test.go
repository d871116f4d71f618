package isolation_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	kjson "sigs.k8s.io/json"

	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
)

const (
	jsonType  = "application/json"
	mergeType = "application/merge-patch+json"
	applyType = "application/apply-patch+yaml"
	protoType = "application/vnd.kubernetes.protobuf"
)

func TestPinAddsTheUIDAndKeepsTheRest(t *testing.T) {
	for _, c := range []struct{ name, verb, contentType, in, want string }{
		{"object", "update", jsonType, `{"kind":"A", "metadata": {"name":"b"},"x":[1]}`, `{"kind":"A", "metadata": {"uid":"u","name":"b"},"x":[1]}`},
		{"empty metadata", "update", jsonType, `{"metadata":{ }}`, `{"metadata":{"uid":"u" }}`},
		{"no metadata", "patch", mergeType, ` {"spec":{}}`, ` {"metadata":{"uid":"u"},"spec":{}}`},
		{"nothing", "patch", "application/strategic-merge-patch+json", `{}`, `{"metadata":{"uid":"u"}}`},
		{"empty uid", "update", jsonType, `{"metadata":{"uid":"","name":"b"}}`, `{"metadata":{"uid":"u","name":"b"}}`},
		{"null", "patch", applyType, `{"metadata":{"uid":null}}`, `{"metadata":{"uid":"u"}}`},
		{"no metadata but null", "patch", mergeType, `{"metadata":null}`, `{"metadata":{"uid":"u"}}`},
		{"escaped key", "update", jsonType, `{"met\u0061data":{"a":1}}`, `{"met\u0061data":{"uid":"u","a":1}}`},
		{"key in another case", "update", jsonType, `{"Metadata":{"UID":"x"}}`, `{"metadata":{"uid":"u"},"Metadata":{"UID":"x"}}`},
		{"uid elsewhere", "update", jsonType, `{"uid":"x","metadata":{"a":{"uid":"y"}}}`, `{"uid":"x","metadata":{"uid":"u","a":{"uid":"y"}}}`},
		{"metadata twice", "patch", mergeType, `{"metadata":{"uid":"x"},"metadata":{}}`, `{"metadata":{"uid":"x"},"metadata":{"uid":"u"}}`},
		{"uid twice", "patch", mergeType, `{"metadata":{"uid":"x","uid":null}}`, `{"metadata":{"uid":"x","uid":"u"}}`},
		{"delete", "delete", jsonType, `{"metadata":{},"gracePeriodSeconds":0}`, `{"preconditions":{"uid":"u"},"metadata":{},"gracePeriodSeconds":0}`},
		{"delete with a version", "delete", jsonType, `{"preconditions":{"resourceVersion":"1"}}`, `{"preconditions":{"uid":"u","resourceVersion":"1"}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			named, pinned, err := isolation.Pin(c.verb, c.contentType, []byte(c.in), "u")
			require.NoError(t, err)
			require.Empty(t, named)
			require.Equal(t, c.want, string(pinned))
		})
	}
}

func TestPinReturnsTheUIDThatABodyNames(t *testing.T) {
	for _, c := range []struct{ verb, in, want string }{
		{"update", `{"metadata":{"uid":"x"}}`, "x"},
		{"update", `{"metadata":{"uid":"","uid":"x"}}`, "x"},
		{"update", `{"metadata":{},"metadata":{"uid":"\u0078"}}`, "x"},
		{"delete", `{"preconditions":{"uid":"x"}}`, "x"},
	} {
		named, pinned, err := isolation.Pin(c.verb, jsonType, []byte(c.in), "u")
		require.NoError(t, err)
		require.Equal(t, c.want, named)
		require.Nil(t, pinned)
	}
}

func TestPinRefusesWhatItCannotRead(t *testing.T) {
	for contentType, bodies := range map[string][]string{
		jsonType:  {`{`, `[]`, `null`, `{"metadata":[]}`, `{"metadata":{"uid":5}}`, `{"metadata":"x"}`},
		protoType: {"k8s", "k8s\x00\xff", "k8s\x00\x12\x02\x0a\x05", "k8s\x00\x12\x02\x08\x05"},
	} {
		for _, body := range bodies {
			_, pinned, err := isolation.Pin("update", contentType, []byte(body), "u")
			require.Error(t, err, "%q", body)
			require.Nil(t, pinned)
		}
	}
	for contentType, body := range map[string]string{applyType: "metadata: {}", "application/json-patch+json": "[]", "a/b/c": ""} {
		named, pinned, err := isolation.Pin("patch", contentType, []byte(body), "u")
		require.NoError(t, err, "it has no place for a uid")
		require.Empty(t, named)
		require.Nil(t, pinned)
	}
}

// envelope returns an object in protobuf.
func envelope(t testing.TB, raw []byte) []byte {
	t.Helper()
	b, err := (&k8sruntime.Unknown{TypeMeta: k8sruntime.TypeMeta{Kind: "A"}, Raw: raw}).Marshal()
	require.NoError(t, err)
	return append([]byte("k8s\x00"), b...)
}

func TestPinInProtobuf(t *testing.T) {
	object := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "b", Labels: map[string]string{"c": "d"}}}
	raw, err := object.Marshal()
	require.NoError(t, err)
	named, pinned, err := isolation.Pin("update", protoType, envelope(t, raw), "u")
	require.NoError(t, err)
	require.Empty(t, named)
	var unknown k8sruntime.Unknown
	var got metav1.PartialObjectMetadata
	require.NoError(t, unknown.Unmarshal(pinned[4:]))
	require.NoError(t, got.Unmarshal(unknown.Raw))
	object.UID = "u"
	require.Equal(t, object, got)
	require.Equal(t, "A", unknown.Kind)

	named, again, err := isolation.Pin("update", protoType, pinned, "v")
	require.NoError(t, err)
	require.Equal(t, "u", named)
	require.Nil(t, again)

	options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: new("7")}}
	raw, err = options.Marshal()
	require.NoError(t, err)
	_, pinned, err = isolation.Pin("delete", protoType, envelope(t, raw), "u")
	require.NoError(t, err)
	require.NoError(t, unknown.Unmarshal(pinned[4:]))
	var deletion metav1.DeleteOptions
	require.NoError(t, deletion.Unmarshal(unknown.Raw))
	require.EqualValues(t, "u", *deletion.Preconditions.UID)
	require.Equal(t, "7", *deletion.Preconditions.ResourceVersion)
}

// A pod pays for four times the size of a body.
func TestPinTakesMemoryOfTheOrderOfTheBody(t *testing.T) {
	const size = 1 << 20
	var members strings.Builder
	for i := 0; members.Len() < size; i++ {
		fmt.Fprintf(&members, `,"%x":1`, i)
	}
	for name, c := range map[string]struct {
		contentType string
		body        []byte
	}{
		"members":             {jsonType, []byte(`{"metadata":{"name":"a"}` + members.String() + "}")},
		"members of metadata": {jsonType, []byte(`{"metadata":{"name":"a"` + members.String() + "}}")},
		"protobuf":            {protoType, envelope(t, protowire.AppendBytes([]byte{0x0a}, bytes.Repeat([]byte{0x6a, 0}, size/2)))},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, pinned, err := isolation.Pin("update", c.contentType, c.body, "u")
			runtime.ReadMemStats(&after)
			require.NoError(t, err)
			require.NotNil(t, pinned)
			require.Less(t, int(after.TotalAlloc-before.TotalAlloc), 2*len(c.body))
		})
	}
}

// FuzzPinJSON checks that the apiserver reads the uid, whether it merges members that occur
// twice, as in an object, or takes the last one, as in a patch.
func FuzzPinJSON(f *testing.F) {
	f.Add([]byte(`{"metadata":{"uid":"x","uid":null},"metadata":{}}`))
	f.Add([]byte(`{"a":{"metadata":1},"metadata":{"a":"\"}"}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		named, pinned, err := isolation.Pin("update", jsonType, in, "u")
		if err != nil {
			return
		}
		want := "u"
		if named != "" {
			want, pinned = named, in
		}
		require.True(t, json.Valid(pinned))
		var merged struct {
			Metadata struct {
				UID string `json:"uid"`
			} `json:"metadata"`
		}
		require.NoError(t, kjson.UnmarshalCaseSensitivePreserveInts(pinned, &merged))
		require.Equal(t, want, merged.Metadata.UID)
		var last map[string]any
		require.NoError(t, json.Unmarshal(pinned, &last))
		require.Equal(t, want, last["metadata"].(map[string]any)["uid"])
	})
}

func FuzzPinProtobuf(f *testing.F) {
	f.Add(envelope(f, []byte("\x0a\x03\x2a\x01x")))
	f.Add(envelope(f, []byte("\x0a\x03\x0a\x01x\x0a\x02\x2a\x00")))
	f.Fuzz(func(t *testing.T, in []byte) {
		named, pinned, err := isolation.Pin("update", protoType, in, "u")
		var unknown k8sruntime.Unknown
		var object metav1.PartialObjectMetadata
		if err != nil || unknown.Unmarshal(in[4:]) != nil || object.Unmarshal(unknown.Raw) != nil {
			return // the apiserver refuses it
		}
		require.Equal(t, string(object.UID), named)
		if named == "" {
			unknown, object = k8sruntime.Unknown{}, metav1.PartialObjectMetadata{}
			require.NoError(t, unknown.Unmarshal(pinned[4:]))
			require.NoError(t, object.Unmarshal(unknown.Raw))
			require.EqualValues(t, "u", object.UID)
		}
	})
}
