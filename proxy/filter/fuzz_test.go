package filter_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// Bounds that fuzzing reaches.
var low = filter.Options{MaxObject: 8 << 10, MaxList: 16 << 10}

// seeds are small, so that inputs are minimised quickly.
func seeds(n int) *corev1.PodList {
	l := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
	for i := range n {
		l.Items = append(l.Items, *seed([]string{"other", own}[i%2]))
	}
	return l
}

func seed(namespace string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "a", UID: "u"}}
}

// readJSON returns the namespace of an object as typed and unstructured clients read it. ok
// is false if a client would fail.
func readJSON(t *testing.T, object []byte) (namespace string, ok bool) {
	var typed metav1.PartialObjectMetadata
	var generic map[string]any
	if utiljson.Unmarshal(object, &typed) != nil || utiljson.Unmarshal(object, &generic) != nil {
		return "", false
	}
	require.Equal(t, typed.Namespace, (&unstructured.Unstructured{Object: generic}).GetNamespace(), "clients differ on %s", object)
	return typed.Namespace, true
}

type jsonItems struct {
	Items []json.RawMessage `json:"items"`
	Rows  []struct {
		Object json.RawMessage `json:"object"`
	} `json:"rows"`
}

// kept returns the items to keep, as clients read them.
func (l jsonItems) kept(t *testing.T) (items []string, ok bool) {
	for _, row := range l.Rows {
		l.Items = append(l.Items, row.Object)
	}
	ok = true
	for _, item := range l.Items {
		namespace, readable := readJSON(t, item)
		ok = ok && readable
		if namespace == own {
			items = append(items, string(item))
		}
	}
	return items, ok
}

// strict decodes JSON and fails on duplicate keys.
var strict = jsonserializer.NewSerializerWithOptions(jsonserializer.DefaultMetaFactory, scheme, scheme, jsonserializer.SerializerOptions{Strict: true})

func FuzzJSONList(f *testing.F) {
	f.Add(encode(f, jsonType, seeds(3)))
	f.Add(encode(f, jsonType, table(seeds(3))))
	f.Add(encode(f, jsonType, &metav1.Status{Code: 200}))
	f.Add([]byte(`{"apiVersion":"e.io/v1", "items" : [ {"metadata":{"namespace":"\u006fwn","name":"é"}} , {"metadata":{}} ] ,"kind":"XList","metadata":{"shardInfo":{"selector":"s"}}} `))
	f.Add([]byte(`{"items":[{"metadata":{"namespace":"own"},"m\u0065tadata":{"namespace":"other"}}],"rows":[{"cells":[]}]}`))
	f.Add([]byte("{\"items\":[{\"metadata\":{\"namespace\":\"own\"},\"x\":[[{}],tru,-1e9,\"\\\\\\\"\"]},{\"metadata\":{\"namespace\":\"\xff\"}}]}"))
	f.Fuzz(func(t *testing.T, in []byte) {
		o := low
		o.ContentType = jsonType
		out, err := run(t, o, in)
		if err != nil {
			var list metav1.PartialObjectMetadataList
			var items jsonItems
			_, _, dups := strict.Decode(in, nil, &unstructured.Unstructured{})
			if dups != nil || len(in) > o.MaxObject || utiljson.Unmarshal(in, &list) != nil || utiljson.Unmarshal(in, &items) != nil || items.Items == nil || items.Rows != nil {
				return
			}
			for _, item := range items.Items {
				if item[0] != '{' {
					return
				}
			}
			t.Fatalf("a list that clients read was refused: %v", err)
		}
		var before, after jsonItems
		if utiljson.Unmarshal(out, &after) != nil {
			require.Error(t, utiljson.Unmarshal(in, &before), "a list became unreadable")
			return
		}
		got, ok := after.kept(t)
		if ok {
			require.Len(t, got, len(after.Items)+len(after.Rows), "something foreign was passed")
		}
		if utiljson.Unmarshal(in, &before) != nil {
			return
		}
		want, ok := before.kept(t)
		if ok {
			require.Equal(t, want, got)
		}
		var others, othersNow map[string]any
		require.NoError(t, utiljson.Unmarshal(in, &others))
		require.NoError(t, utiljson.Unmarshal(out, &othersNow))
		for _, m := range []map[string]any{others, othersNow} {
			delete(m, "items")
			delete(m, "rows")
		}
		require.Equal(t, others, othersNow)
	})
}

// jsonEvent is an event as clients read it.
type jsonEvent struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// stays reports whether an event is kept.
func (e jsonEvent) stays(t *testing.T) (stays, ok bool) {
	if e.Type == string(watch.Bookmark) || e.Type == string(watch.Error) {
		return true, true
	}
	var object metav1.TypeMeta
	var rows jsonItems
	if utiljson.Unmarshal(e.Object, &object) != nil {
		return false, false
	}
	if gv := object.GroupVersionKind().GroupVersion(); object.Kind == "Table" && gv.Group == metav1.GroupName {
		if utiljson.Unmarshal(e.Object, &rows) != nil || len(rows.Rows) == 0 {
			return false, false
		}
		rows.Items = nil
		kept, ok := rows.kept(t)
		return len(kept) == len(rows.Rows), ok
	}
	namespace, ok := readJSON(t, e.Object)
	return namespace == own, ok
}

// readEvents reads events until one is invalid.
func readEvents(in []byte) (out []jsonEvent, err error) {
	d := json.NewDecoder(bytes.NewReader(in))
	for {
		var raw json.RawMessage
		var e jsonEvent
		if err = d.Decode(&raw); err == nil {
			err = utiljson.Unmarshal(raw, &e)
		}
		if err != nil {
			return out, err
		}
		out = append(out, e)
	}
}

// requireUnchanged requires that a lenient reader that keeps all objects changes nothing, however the bytes come.
func requireUnchanged(t *testing.T, o filter.Options, in []byte) {
	o.Lenient = true
	for _, src := range []io.Reader{bytes.NewReader(in), iotest.OneByteReader(iotest.DataErrReader(bytes.NewReader(in)))} {
		r, err := filter.New(src, func(filter.Key) bool { return true }, o)
		require.NoError(t, err)
		out, err := io.ReadAll(r)
		require.NoError(t, err)
		require.Equal(t, string(in), string(out))
	}
}

func FuzzJSONWatch(f *testing.F) {
	for _, namespace := range []string{own, "other"} {
		f.Add(append(event(f, jsonType, watch.Added, seed(namespace)), event(f, jsonType, watch.Deleted, seed(own))...))
		f.Add(event(f, jsonType, watch.Modified, table(&corev1.PodList{Items: []corev1.Pod{*seed(namespace)}})))
	}
	f.Add(append(event(f, jsonType, watch.Added, table(&corev1.PodList{Items: []corev1.Pod{*seed("other")}})),
		`{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions":null,"rows":[{"object":{"metadata":{"namespace":"own"}}}]}}`...))
	f.Add([]byte(`{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io//","rows":[{"object":{"metadata":{"namespace":"own"}}}]}}`))
	f.Add(append(event(f, jsonType, watch.Bookmark, seed("")), event(f, jsonType, watch.Error, &metav1.Status{Code: 410})...))
	f.Add([]byte(` {"object":{"metadata":{"namespace":"other"}},"type":"BOOKMARK"} {"type":"ADDED","object":{"kind":"Table","apiVersion":"e.io/v1","metadata":{"namespace":"own"}}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		o := low
		o.ContentType, o.Watch = jsonType, true
		requireUnchanged(t, o, in)
		out, err := run(t, o, in)
		before, beforeErr := readEvents(in)
		after, _ := readEvents(out)
		var want []jsonEvent
		for _, e := range before {
			if stays, ok := e.stays(t); stays {
				want = append(want, e)
			} else if !ok && err == nil {
				return // a client ends here
			}
		}
		for _, e := range after {
			if stays, ok := e.stays(t); ok {
				require.True(t, stays, "something foreign was passed: %s", e.Object)
			}
		}
		if err == nil && errors.Is(beforeErr, io.EOF) {
			require.Equal(t, lessColumns(t, want), lessColumns(t, after))
		}
	})
}

// lessColumns removes the columns of Tables, which may be from an earlier event.
func lessColumns(t *testing.T, events []jsonEvent) []jsonEvent {
	for i := range events {
		var o map[string]json.RawMessage
		if utiljson.Unmarshal(events[i].Object, &o) != nil || string(o["kind"]) != `"Table"` {
			continue
		}
		delete(o, "columnDefinitions")
		var err error
		events[i].Object, err = json.Marshal(o)
		require.NoError(t, err)
	}
	return events
}

// ownItems returns a list without its foreign objects; nil if it is no list of objects.
func ownItems(t *testing.T, o runtime.Object) runtime.Object {
	if _, ok := o.(metav1.ListInterface); !ok || !meta.IsListType(o) {
		return nil
	}
	var kept []runtime.Object
	require.NoError(t, meta.EachListItem(o, func(item runtime.Object) error {
		object, err := meta.Accessor(item)
		if err == nil && object.GetNamespace() == own {
			kept = append(kept, item)
		}
		return err
	}))
	o = o.DeepCopyObject()
	require.NoError(t, meta.SetList(o, kept))
	return o
}

func FuzzProtobufList(f *testing.F) {
	f.Add(encode(f, protoType, seeds(3)))
	f.Add(encode(f, protoType, partials(seeds(3))))
	f.Add(encode(f, protoType, partialsBeta(seeds(3))))
	f.Add(encode(f, protoType, &corev1.SecretList{Items: []corev1.Secret{{ObjectMeta: seed(own).ObjectMeta, Data: map[string][]byte{"k": {0, 1}}}}}))
	f.Add(encode(f, protoType, &metav1.Status{Code: 200}))
	f.Fuzz(func(t *testing.T, in []byte) {
		o := low
		o.ContentType = protoType
		out, err := run(t, o, in)
		before, beforeErr := decode(protoType, in)
		if beforeErr == nil && len(in) < low.MaxObject {
			if want := ownItems(t, before); want != nil {
				// The encoding of the apiserver must be readable.
				again, err := run(t, o, encode(t, protoType, before))
				require.NoError(t, err)
				require.Equal(t, encode(t, protoType, want), encode(t, protoType, mustDecode(t, again)))
			}
		}
		if err != nil {
			return
		}
		after, afterErr := decode(protoType, out)
		if afterErr != nil {
			require.Error(t, beforeErr, "a list became unreadable")
			return
		}
		if own := ownItems(t, after); own != nil {
			require.Equal(t, meta.LenList(own), meta.LenList(after), "something foreign was passed")
		}
		if beforeErr == nil {
			if want := ownItems(t, before); want != nil {
				require.Equal(t, encode(t, protoType, want), encode(t, protoType, after))
			}
		}
	})
}

func mustDecode(t *testing.T, b []byte) runtime.Object {
	o, err := decode(protoType, b)
	require.NoError(t, err)
	return o
}

func FuzzProtobufWatch(f *testing.F) {
	for _, namespace := range []string{own, "other"} {
		f.Add(append(event(f, protoType, watch.Added, seed(namespace)), event(f, protoType, watch.Deleted, seed(own))...))
	}
	f.Add(append(event(f, protoType, watch.Bookmark, seed("")), event(f, protoType, watch.Error, &metav1.Status{Code: 410})...))
	f.Fuzz(func(t *testing.T, in []byte) {
		o := low
		o.ContentType, o.Watch = protoType, true
		requireUnchanged(t, o, in)
		out, err := run(t, o, in)
		before, beforeErr := events(protoType, in)
		after, _ := events(protoType, out)
		stays := func(e decoded) bool {
			if e.kind == watch.Bookmark || e.kind == watch.Error {
				return true
			}
			object, err := meta.Accessor(e.object)
			return err != nil || object.GetNamespace() == own
		}
		var want []decoded
		for _, e := range before {
			if stays(e) {
				want = append(want, e)
			}
		}
		for _, e := range after {
			require.True(t, stays(e), "something foreign was passed")
		}
		if err == nil && errors.Is(beforeErr, io.EOF) {
			require.Equal(t, want, after)
		}
	})
}
