package lock_test

import (
	"encoding/json"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/client-go/kubernetes/scheme"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

const (
	jsonType  = "application/json"
	protoType = "application/vnd.kubernetes.protobuf"
)

func newLock(t testing.TB) *lock.Lock {
	t.Helper()
	l, err := lock.New(&meshv1.Lock{Namespace: "op", Name: "op", UpstreamName: "op---s1"})
	require.NoError(t, err)
	return l
}

func TestNewRejectsInvalidNames(t *testing.T) {
	for _, m := range []*meshv1.Lock{
		{Namespace: "a", Name: "b"},
		{Namespace: "a", Name: "b", UpstreamName: "b"},
		{Namespace: "a/b", Name: "b", UpstreamName: "c"},
		{Namespace: "a", Name: "B", UpstreamName: "c"},
	} {
		_, err := lock.New(m)
		require.Error(t, err, m)
	}
}

func TestPathReplacesOneSegment(t *testing.T) {
	l := newLock(t)
	for path, want := range map[string]string{
		"/apis/coordination.k8s.io/v1/namespaces/op/leases/op":  "/apis/coordination.k8s.io/v1/namespaces/op/leases/op---s1",
		"/apis/coordination.k8s.io/v1/namespaces/op/leases/op/": "/apis/coordination.k8s.io/v1/namespaces/op/leases/op---s1/",
		"/api/v1/namespaces/op/configmaps/%6fp":                 "/api/v1/namespaces/op/configmaps/op---s1",
	} {
		require.Equal(t, want, l.Path(path, 0))
	}
}

func TestQuery(t *testing.T) {
	l := newLock(t)
	for _, c := range []struct {
		name, raw, want string
		byName          bool
	}{
		{"one equals", "limit=1&fieldSelector=metadata.name%3Dop", "metadata.name=op---s1", true},
		{"raw equals", "fieldSelector=metadata.name=op", "metadata.name=op---s1", true},
		{"two equals", "fieldSelector=metadata.name%3D%3Dop&watch=1", "metadata.name=op---s1", true},
		{"with others", "fieldSelector=metadata.namespace%3Dop,metadata.name%3Dop", "metadata.name=op---s1,metadata.namespace=op", true},
		{"another name", "fieldSelector=metadata.name%3Dopx", "metadata.name=opx", false},
		{"not the name", "fieldSelector=metadata.name!%3Dop", "metadata.name!=op", false},
		{"the upstream name", "fieldSelector=metadata.name%3Dop---s1", "metadata.name=op---s1", false},
		{"the namespace alone", "fieldSelector=metadata.namespace%3Dop", "metadata.namespace=op", false},
		{"none", "limit=1", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, byName, err := l.Query(c.raw)
			require.NoError(t, err)
			require.Equal(t, c.byName, byName)
			values, err := url.ParseQuery(out)
			require.NoError(t, err)
			require.Equal(t, c.want, values.Get("fieldSelector"))
			if !byName {
				require.Equal(t, c.raw, out)
			}
		})
	}
	for _, raw := range []string{"fieldSelector=%zz", "fieldSelector=a", "x=1;fieldSelector=metadata.name=op"} {
		_, _, err := l.Query(raw)
		require.Error(t, err, raw)
	}
}

func TestRequestEditsTheNameAlone(t *testing.T) {
	l := newLock(t)
	for _, c := range []struct{ name, contentType, in, want string }{
		{"lease", jsonType, `{"kind":"Lease","metadata":{"name":"op","namespace":"op","labels":{"name":"op"}},"spec":{"holderIdentity":"op","new":1e400}}`,
			`{"kind":"Lease","metadata":{"name":"op---s1","namespace":"op","labels":{"name":"op"}},"spec":{"holderIdentity":"op","new":1e400}}`},
		{"blanks and order stay", jsonType + "; charset=utf-8", " {\n \"metadata\" : { \"x\" : [ ] , \"name\" : \"op\" } }\n", " {\n \"metadata\" : { \"x\" : [ ] , \"name\" : \"op---s1\" } }\n"},
		{"no content type", "", `{"metadata":{"name":"op"}}`, `{"metadata":{"name":"op---s1"}}`},
		{"escaped key and value", jsonType, `{"met\u0061data":{"n\u0061me":"\u006fp"}}`, `{"met\u0061data":{"n\u0061me":"op---s1"}}`},
		{"said twice", jsonType, `{"metadata":{"name":"x"},"metadata":{"name":"op"}}`, `{"metadata":{"name":"x"},"metadata":{"name":"op---s1"}}`},
		{"escaped quotes around", jsonType, `{"a":"\"}","metadata":{"b":"\\","name":"op"}}`, `{"a":"\"}","metadata":{"b":"\\","name":"op---s1"}}`},
		{"merge patch", "application/merge-patch+json", `{"metadata":{"name":"op"}}`, `{"metadata":{"name":"op---s1"}}`},
		{"strategic patch", "application/strategic-merge-patch+json", `{"metadata":{"name":"op"}}`, `{"metadata":{"name":"op---s1"}}`},
		{"JSON patch", "application/json-patch+json",
			`[{"op":"test","path":"/metadata/name","value":"op"},{"value":{"name":"op"},"path":"/metadata","op":"replace"},{"op":"add","path":"/data/name","value":"op"},1]`,
			`[{"op":"test","path":"/metadata/name","value":"op---s1"},{"value":{"name":"op---s1"},"path":"/metadata","op":"replace"},{"op":"add","path":"/data/name","value":"op"},1]`},
		{"apply as JSON", "application/apply-patch+yaml", `{"metadata": {"name":"op"}}`, `{"metadata": {"name":"op---s1"}}`},
		{"apply as YAML", "application/apply-patch+yaml", "metadata:\n  name: op\n", `{"metadata":{"name":"op---s1"}}`},
		{"YAML that names it in another style", "application/yaml", "x: \"&n\"\n\"metadata\": {? 'name' : \"\\x6fp\"}\n", `{"metadata":{"name":"op---s1"},"x":"\u0026n"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := l.Request(c.contentType, []byte(c.in))
			require.NoError(t, err)
			require.Equal(t, c.want, string(got.Bytes))
			require.True(t, got.Lock)
		})
	}
}

func TestRequestOfAnotherObjectKeepsItsBytes(t *testing.T) {
	l := newLock(t)
	for contentType, bodies := range map[string][]string{
		jsonType:                       {`{"metadata":{"name":"other"}}`, `{"metadata":{"generateName":"op"}}`, `{"name":"op"}`, `{"metadata":{"name":"op---s1"}}`, `{"metadata":"op"}`, `[]`, `null`, `"op"`, `1`},
		"application/yaml":             {"metadata:\n  name: other # op\n"},
		"application/json-patch+json":  {`[]`, `null`, `[{"op":"remove","path":"/metadata/name"}]`},
		"application/apply-patch+yaml": {"metadata: {name: other}"},
	} {
		for _, in := range bodies {
			got, err := l.Request(contentType, []byte(in))
			require.NoError(t, err, in)
			require.False(t, got.Lock, in)
			require.Equal(t, in, string(got.Bytes))
		}
	}
}

func TestUnreadableRequestsAreErrors(t *testing.T) {
	l := newLock(t)
	for _, contentType := range []string{"application/cbor", "application/apply-patch+cbor", "text/html", "a/b/c"} {
		_, err := l.Request(contentType, []byte("x"))
		require.ErrorIs(t, err, lock.ErrUnsupported, contentType)
	}
	for contentType, body := range map[string]string{
		jsonType: `{"metadata":`, protoType: "k8", "application/json-patch+json": `{}`, "application/yaml": "a: [",
	} {
		_, err := l.Request(contentType, []byte(body))
		require.Error(t, err, contentType)
		require.NotErrorIs(t, err, lock.ErrUnsupported)
	}
}

func TestAnswerJSON(t *testing.T) {
	l := newLock(t)
	for _, c := range []struct{ name, in, want string }{
		{"object", `{"kind":"Lease","metadata":{"name":"op---s1","selfLink":"/apis/x/leases/op---s1"},"spec":{"strategy":"new"}}`,
			`{"kind":"Lease","metadata":{"name":"op","selfLink":"/apis/x/leases/op"},"spec":{"strategy":"new"}}`},
		{"list", `{"kind":"LeaseList","metadata":{"resourceVersion":"9"},"items":[{"metadata":{"name":"op---s1"}},{"metadata":{"name":"op---s2"}}]}`,
			`{"kind":"LeaseList","metadata":{"resourceVersion":"9"},"items":[{"metadata":{"name":"op"}},{"metadata":{"name":"op---s2"}}]}`},
		{"table", `{"kind":"Table","rows":[{"cells":["op---s1","holder",5],"object":{"kind":"PartialObjectMetadata","metadata":{"name":"op---s1"}}}]}`,
			`{"kind":"Table","rows":[{"cells":["op","holder",5],"object":{"kind":"PartialObjectMetadata","metadata":{"name":"op"}}}]}`},
		{"status", `{"message":"leases.coordination.k8s.io \"op---s1\" not found","details":{"name":"op---s1"},"kind":"Status"}`,
			`{"message":"leases.coordination.k8s.io \"op\" not found","details":{"name":"op"},"kind":"Status"}`},
		{"data is not a name", `{"kind":"ConfigMap","metadata":{"name":"op---s1"},"data":{"name":"op---s1"},"message":"\"op---s1\""}`,
			`{"kind":"ConfigMap","metadata":{"name":"op"},"data":{"name":"op---s1"},"message":"\"op---s1\""}`},
		{"nothing", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := l.Answer(jsonType, []byte(c.in))
			require.NoError(t, err)
			require.Equal(t, c.want, string(got))
		})
	}
	_, err := l.Answer("application/cbor", []byte("x"))
	require.ErrorIs(t, err, lock.ErrUnsupported)
}

var protoCodec = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)

func encode(t testing.TB, o runtime.Object) []byte {
	t.Helper()
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	require.NoError(t, err)
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	b, err := runtime.Encode(protoCodec, o)
	require.NoError(t, err)
	return b
}

func decode(t testing.TB, b []byte) runtime.Object {
	t.Helper()
	o, err := runtime.Decode(protoCodec, b)
	require.NoError(t, err)
	return o
}

func lease(name string) *coordinationv1.Lease {
	holder, seconds := "me", int32(15)
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "op", UID: "u", ResourceVersion: "7", Labels: map[string]string{"name": "op"}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds},
	}
}

func TestProtobufThereAndBack(t *testing.T) {
	l := newLock(t)
	annotated := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "op", Annotations: map[string]string{"a": "op"}},
		Data:       map[string]string{"name": "op", "big": strings.Repeat("x", 70000)},
	}
	for name, o := range map[string]runtime.Object{"lease": lease("op"), "configmap": annotated} {
		t.Run(name, func(t *testing.T) {
			in := encode(t, o)
			up, err := l.Request(protoType, in)
			require.NoError(t, err)
			require.True(t, up.Lock)
			named := o.DeepCopyObject()
			named.(metav1.Object).SetName("op---s1")
			require.Equal(t, named, decode(t, up.Bytes))
			back, err := l.Answer(protoType, up.Bytes)
			require.NoError(t, err)
			require.Equal(t, in, back)
		})
	}
}

func TestProtobufAnswers(t *testing.T) {
	l := newLock(t)
	list := &coordinationv1.LeaseList{Items: []coordinationv1.Lease{*lease("op---s1"), *lease("op---s2")}}
	got, err := l.Answer(protoType, encode(t, list))
	require.NoError(t, err)
	items := decode(t, got).(*coordinationv1.LeaseList).Items
	require.Equal(t, "op", items[0].Name)
	require.Equal(t, "op---s2", items[1].Name)

	status := &metav1.Status{Message: `leases "op---s1" not found`, Details: &metav1.StatusDetails{Name: "op---s1", Kind: "leases"}, Code: 404}
	status.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "Status"})
	b, err := runtime.Encode(protoCodec, status)
	require.NoError(t, err)
	got, err = l.Answer(protoType, b)
	require.NoError(t, err)
	out := decode(t, got).(*metav1.Status)
	require.Equal(t, `leases "op" not found`, out.Message)
	require.Equal(t, "op", out.Details.Name)
	require.EqualValues(t, 404, out.Code)
}

func TestProtobufKeepsUnknownFields(t *testing.T) {
	l := newLock(t)
	unknown := &runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "coordination.k8s.io/v9", Kind: "Lease"}}
	// metadata{name:"op", 99:"?"}, 200:"future", metadata again as proto merges it
	unknown.Raw = []byte("\x0a\x09\x0a\x02op\x9a\x06\x01?" + "\xc2\x0c\x06future" + "\x0a\x04\x0a\x02op")
	unknown.Raw[1] = 8
	raw, err := unknown.Marshal()
	require.NoError(t, err)
	in := append([]byte("k8s\x00"), raw...)
	got, err := l.Request(protoType, in)
	require.NoError(t, err)
	require.True(t, got.Lock)
	var after runtime.Unknown
	require.NoError(t, after.Unmarshal(got.Bytes[4:]))
	require.Equal(t, unknown.TypeMeta, after.TypeMeta)
	require.Equal(t, "\x0a\x0d\x0a\x07op---s1\x9a\x06\x01?"+"\xc2\x0c\x06future"+"\x0a\x09\x0a\x07op---s1", string(after.Raw))
}

// Lengths may be encoded in more bytes than they need.
func TestProtobufKeepsLengthsInLongForm(t *testing.T) {
	l := newLock(t)
	unknown := &runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}}
	unknown.Raw = []byte("\x0a\x85\x00\x0a\x82\x00op") // metadata{name:"op"}
	raw, err := unknown.Marshal()
	require.NoError(t, err)
	got, err := l.Request(protoType, append([]byte("k8s\x00"), raw...))
	require.NoError(t, err)
	require.True(t, got.Lock)
	var after runtime.Unknown
	require.NoError(t, after.Unmarshal(got.Bytes[4:]))
	require.Equal(t, "\x0a\x09\x0a\x07op---s1", string(after.Raw))
}

func TestEventsJSON(t *testing.T) {
	l := newLock(t)
	in := `{"type":"ADDED","object":{"kind":"Lease","metadata":{"name":"op---s1"}}}` + "\n" +
		`{"type":"BOOKMARK","object":{"kind":"Lease","metadata":{"resourceVersion":"7","name":""}}}` + "\n" +
		`{"type":"ERROR","object":{"kind":"Status","message":"\"op---s1\" is gone","code":410}}` + "\n" +
		"not an event\n" +
		`{"type":"MODIFIED","object":{"metadata":{"name":"op---s1"},"x":"` + strings.Repeat("y", 9000) + `"}}` + "\n"
	r, err := l.Events(jsonType+";stream=watch", strings.NewReader(in))
	require.NoError(t, err)
	got, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, strings.ReplaceAll(in, "op---s1", "op"), string(got))
}

func TestEventsProtobuf(t *testing.T) {
	l := newLock(t)
	var in strings.Builder
	framer := protobuf.LengthDelimitedFramer.NewFrameWriter(&in)
	raw := protobuf.NewRawSerializer(scheme.Scheme, scheme.Scheme)
	for _, name := range []string{"op---s1", "other"} {
		event := &metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Raw: encode(t, lease(name))}}
		require.NoError(t, streaming.NewEncoder(framer, raw).Encode(event))
	}
	r, err := l.Events(protoType+";stream=watch", strings.NewReader(in.String()))
	require.NoError(t, err)
	d := streaming.NewDecoder(protobuf.LengthDelimitedFramer.NewFrameReader(io.NopCloser(r)), raw)
	for _, want := range []string{"op", "other"} {
		var event metav1.WatchEvent
		_, _, err := d.Decode(nil, &event)
		require.NoError(t, err)
		require.Equal(t, lease(want).ObjectMeta, decode(t, event.Object.Raw).(*coordinationv1.Lease).ObjectMeta)
	}
	_, _, err = d.Decode(nil, &metav1.WatchEvent{})
	require.ErrorIs(t, err, io.EOF)

	cut, err := l.Events(protoType, strings.NewReader(in.String()[:20]))
	require.NoError(t, err)
	_, err = io.ReadAll(cut)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	huge, err := l.Events(protoType, strings.NewReader("\xff\xff\xff\xff"))
	require.NoError(t, err)
	_, err = io.ReadAll(huge)
	require.Error(t, err)
}

func TestHolder(t *testing.T) {
	leaseJSON, err := json.Marshal(lease("op"))
	require.NoError(t, err)
	record := `{"holderIdentity":"me","leaseDurationSeconds":15}`
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "7", Annotations: map[string]string{
		"x": "y", "control-plane.alpha.kubernetes.io/leader": record,
	}}}
	cmJSON, err := json.Marshal(cm)
	require.NoError(t, err)
	released := lease("op")
	released.Spec.HolderIdentity = new(string)
	for _, c := range []struct {
		name, contentType string
		body              []byte
		holder            string
	}{
		{"lease JSON", jsonType, leaseJSON, "me"},
		{"lease protobuf", protoType, encode(t, lease("op")), "me"},
		{"configmap JSON", jsonType, cmJSON, "me"},
		{"configmap protobuf", protoType, encode(t, cm), "me"},
		{"released", protoType, encode(t, released), ""},
		{"nonsense", jsonType, []byte("{"), ""},
		{"nonsense protobuf", protoType, []byte("k8s\x00\xff"), ""},
	} {
		held := lock.ReadHeld(c.contentType, c.body)
		require.Equal(t, c.holder, held.Holder, c.name)
		if c.holder != "" {
			require.Equal(t, lock.Held{Holder: c.holder, For: 15 * time.Second, Version: "7"}, held, c.name)
		}
	}
}

func TestAccept(t *testing.T) {
	for in, want := range map[string]string{
		"":                                   "application/json",
		"*/*":                                "application/json",
		"application/cbor, application/json": "application/json",
		"application/vnd.kubernetes.protobuf,application/json;q=0.5":         "application/vnd.kubernetes.protobuf,application/json;q=0.5",
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/yaml, */*": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
	} {
		got, ok := lock.Accept(in)
		require.True(t, ok, in)
		require.Equal(t, want, got)
	}
	_, ok := lock.Accept("application/yaml, application/cbor")
	require.False(t, ok)
}

// What goes up and comes back is what was sent, when it is valid, and nothing
// else than the name differs on the way.
func FuzzJSON(f *testing.F) {
	f.Add([]byte(`{"metadata":{"name":"op","a":[1,{"b":"\""}]},"items":[{"metadata":{"name":"op"}}]}`))
	f.Add([]byte(`[{"path":"/metadata/name","value":"op"}]`))
	f.Fuzz(func(t *testing.T, in []byte) {
		l := newLock(t)
		for _, contentType := range []string{jsonType, "application/json-patch+json", "application/apply-patch+yaml"} {
			got, err := l.Request(contentType, in)
			if err != nil {
				continue
			}
			if !got.Lock {
				require.Equal(t, in, got.Bytes)
			} else {
				require.True(t, json.Valid(got.Bytes))
			}
		}
		up, err := l.Request(jsonType, in)
		require.Equal(t, json.Valid(in), err == nil)
		if err != nil {
			return
		}
		// As the apiserver reads it: the object must not be the unsharded lock.
		var object struct {
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
		}
		if json.Unmarshal(up.Bytes, &object) == nil && strings.Count(strings.ToLower(string(in)), "metadata") == 1 &&
			strings.Contains(string(in), "metadata") && strings.Contains(string(in), `"name"`) && strings.Count(strings.ToLower(string(in)), "name") == 1 {
			require.NotEqual(t, "op", object.Metadata.Name)
		}
		_, err = l.Answer(jsonType, in)
		require.NoError(t, err)
	})
}

func FuzzProtobuf(f *testing.F) {
	f.Add(encode(f, lease("op")))
	f.Add(encode(f, &coordinationv1.LeaseList{Items: []coordinationv1.Lease{*lease("op---s1")}}))
	f.Fuzz(func(t *testing.T, in []byte) {
		l := newLock(t)
		_ = lock.ReadHeld(protoType, in)
		_, _ = l.Answer(protoType, in)
		before, decodeErr := runtime.Decode(protoCodec, in)
		up, err := l.Request(protoType, in)
		if decodeErr != nil {
			return
		}
		if err != nil {
			require.NotEqual(t, string(encode(t, before)), string(in), "clients encode it so, and we do not read it")
			return
		}
		o, ok := before.(metav1.Object)
		if !ok {
			return
		}
		if o.GetName() != "op" {
			if !up.Lock {
				require.Equal(t, in, up.Bytes)
			}
			return
		}
		after, err := runtime.Decode(protoCodec, up.Bytes)
		require.NoError(t, err)
		require.Equal(t, "op---s1", after.(metav1.Object).GetName())
	})
}

func FuzzQuery(f *testing.F) {
	f.Add("limit=1&fieldSelector=metadata.name%3Dop,a!=b")
	f.Fuzz(func(t *testing.T, raw string) {
		l := newLock(t)
		out, byName, err := l.Query(raw)
		if err != nil || !byName {
			return
		}
		before, err := url.ParseQuery(raw)
		require.NoError(t, err)
		after, err := url.ParseQuery(out)
		require.NoError(t, err)
		require.Contains(t, after.Get("fieldSelector"), "metadata.name=op---s1")
		delete(before, "fieldSelector")
		delete(after, "fieldSelector")
		require.Equal(t, before, after)
	})
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("{\"object\":{}}\n{}"), true)
	f.Add([]byte("\x00\x00\x00\x02\x0a\x00"), false)
	f.Fuzz(func(t *testing.T, in []byte, asJSON bool) {
		contentType := protoType
		if asJSON {
			contentType = jsonType
		}
		r, err := newLock(t).Events(contentType, strings.NewReader(string(in)))
		require.NoError(t, err)
		got, err := io.ReadAll(r)
		if asJSON && !strings.Contains(string(in), "op---s1") && !strings.Contains(string(in), "\\") {
			require.NoError(t, err)
			require.Equal(t, string(in), string(got))
		}
	})
}
