package filter_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// All lists that client-go knows have their items and metadata where the filter expects
// them.
func TestListsOfAllKindsAreFiltered(t *testing.T) {
	lists := listsOfAllKinds(t, "other", own, "other")
	for gvk, o := range lists {
		for _, media := range []string{jsonType, protoType} {
			all := encode(t, media, o)
			got, err := run(t, filter.Options{ContentType: media}, all)
			require.NoError(t, err, gvk)
			require.Equal(t, string(encode(t, media, ownItems(t, o))), string(got), gvk)
		}
	}
	require.Greater(t, len(lists), 100)
}

// listsOfAllKinds returns a list of each kind that client-go knows, at version 7, with an object
// in each of some namespaces: 0, 1 and so on.
func listsOfAllKinds(t *testing.T, namespaces ...string) map[schema.GroupVersionKind]runtime.Object {
	t.Helper()
	out := map[schema.GroupVersionKind]runtime.Object{}
	for gvk := range scheme.AllKnownTypes() {
		o, err := scheme.New(gvk)
		require.NoError(t, err)
		list, ok := o.(metav1.ListInterface)
		if !ok || !meta.IsListType(o) || gvk.Kind == "List" || gvk.Version == runtime.APIVersionInternal {
			continue
		}
		list.SetResourceVersion("7")
		items, err := meta.GetItemsPtr(o)
		require.NoError(t, err)
		slice := reflect.ValueOf(items).Elem()
		slice.Set(reflect.MakeSlice(slice.Type(), len(namespaces), len(namespaces)))
		for i, namespace := range namespaces {
			item, ok := reflect.TypeAssert[metav1.Object](slice.Index(i).Addr())
			require.True(t, ok, gvk)
			item.SetNamespace(namespace)
			item.SetName(fmt.Sprint(i))
		}
		out[gvk] = o
	}
	return out
}

func TestKeyOfReadsObjectsAndTables(t *testing.T) {
	p := pod(own, "a")
	secret := &corev1.Secret{ObjectMeta: p.ObjectMeta}
	part := partial(p, "v1")
	for _, c := range []struct {
		media string
		o     runtime.Object
	}{
		{jsonType, p}, {protoType, p}, {jsonType, secret}, {protoType, secret}, {jsonType, &part}, {protoType, &part},
		{jsonType, table(&corev1.PodList{Items: []corev1.Pod{*p}})},
	} {
		body := encode(t, c.media, c.o)
		namespace, name, uid, err := filter.KeyOf(c.media, body)
		require.NoError(t, err)
		require.Equal(t, []string{own, "a", "uid-a"}, []string{namespace, name, uid})
		for i := range body[:len(body)-1] {
			namespace, _, _, err := filter.KeyOf(c.media, body[:i])
			if c.media == jsonType {
				require.ErrorIs(t, err, filter.ErrForm)
			}
			require.Contains(t, []string{"", own}, namespace)
		}
	}
	for _, body := range []string{"", "null", "[]", `{"metadata":{}} {}`, `{"metadata":{"uid":1}}`, `{"metadata":{"uid":"a","uid":"a"}}`} {
		_, _, _, err := filter.KeyOf(jsonType, []byte(body))
		require.ErrorIs(t, err, filter.ErrForm, body)
	}
	for _, l := range []*corev1.PodList{{}, pods(2)} {
		_, _, _, err := filter.KeyOf(jsonType, encode(t, jsonType, table(l)))
		require.ErrorIs(t, err, filter.ErrForm)
	}
	_, _, _, err := filter.KeyOf(protoType, []byte("k8s"))
	require.ErrorIs(t, err, filter.ErrForm)
	_, _, _, err = filter.KeyOf("application/cbor", nil)
	require.ErrorIs(t, err, filter.ErrType)
}

func TestAcceptKeepsFilterableTypes(t *testing.T) {
	for _, c := range []struct {
		in   []string
		want string
	}{
		{nil, "application/json"},
		{[]string{" "}, "application/json"},
		{[]string{"*/*"}, "application/json"},
		{[]string{"*"}, "application/json"},
		{[]string{"*/*;q=0.1, application/vnd.kubernetes.protobuf"}, "application/vnd.kubernetes.protobuf,application/json;q=0.1"},
		{[]string{"application/cbor, application/json"}, "application/json"},
		{[]string{"application/vnd.kubernetes.protobuf;stream=watch", "application/yaml, application/json;q=0.5"}, "application/vnd.kubernetes.protobuf;stream=watch,application/json;q=0.5"},
		{[]string{"application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json"}, "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json"},
		{[]string{`application/json;a="b,c", text/html`}, `application/json;a="b`}, // as the apiserver reads it
	} {
		got, ok := filter.Accept(c.in)
		require.True(t, ok, c.in)
		require.Equal(t, c.want, got)
	}
	for _, none := range []string{"application/yaml, application/cbor", "text/*", ","} {
		_, ok := filter.Accept([]string{none})
		require.False(t, ok, none)
	}
}

func TestUnsupportedTypesAreRefused(t *testing.T) {
	for _, contentType := range []string{"", "application/yaml", "application/cbor", "application/cbor-seq", "text/plain", "application/json; x", "application/json-patch+json"} {
		_, err := filter.New(strings.NewReader(""), keep, filter.Options{ContentType: contentType})
		require.ErrorIs(t, err, filter.ErrType, contentType)
	}
	_, err := filter.New(strings.NewReader(""), keep, filter.Options{ContentType: "Application/JSON; charset=utf-8"})
	require.NoError(t, err)
}

// Only a list that the apiserver narrowed passes unchanged.
func TestEchoedSelectorPassesListsUnchanged(t *testing.T) {
	const selector = "shardRange(object.metadata.namespace, '0x0000000000000000', '0x8000000000000000')"
	l := pods(20)
	l.ShardInfo = &metav1.ShardInfo{Selector: selector}
	for _, media := range []string{jsonType, protoType} {
		for _, o := range []runtime.Object{l, table(l), partials(l)} {
			if _, isTable := o.(*metav1.Table); isTable && media == protoType {
				continue
			}
			body := encode(t, media, o)
			r, err := filter.New(bytes.NewReader(body), keep, filter.Options{ContentType: media, ShardSelector: selector})
			require.NoError(t, err)
			_, err = io.ReadFull(r, make([]byte, 1))
			require.NoError(t, err)
			require.True(t, r.Echoed())
			rest, err := io.ReadAll(r)
			require.NoError(t, err)
			require.Equal(t, string(body[1:]), string(rest))
			require.Zero(t, r.Dropped())

			for _, asked := range []string{"", "shardRange(object.metadata.namespace, '0x0000000000000000', '0x7000000000000000')"} {
				r, err := filter.New(bytes.NewReader(body), keep, filter.Options{ContentType: media, ShardSelector: asked})
				require.NoError(t, err)
				_, err = io.ReadAll(r)
				require.NoError(t, err)
				require.False(t, r.Echoed())
				require.Equal(t, 16, r.Dropped())
			}
		}
	}
	// Lists of custom resources have their items before their metadata.
	custom := `{"apiVersion":"e.io/v1","items":[{"metadata":{"namespace":"own"}},{"metadata":{"namespace":"other"}}],"kind":"XList","metadata":{"shardInfo":{"selector":"s"}}}`
	r, err := filter.New(strings.NewReader(custom), keep, filter.Options{ContentType: jsonType, ShardSelector: "s"})
	require.NoError(t, err)
	got, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, strings.Replace(custom, `,{"metadata":{"namespace":"other"}}`, "", 1), string(got))
	require.True(t, r.Echoed())
}

// pieces returns one piece for each Read, and fails the test after the last.
type pieces struct {
	t    *testing.T
	rest [][]byte
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if len(p.rest) == 0 {
		p.t.Error("what has come is held back")
		return 0, io.EOF
	}
	n := copy(b, p.rest[0])
	p.rest = p.rest[1:]
	return n, nil
}

func TestEventsPassAsTheyArrive(t *testing.T) {
	for _, media := range []string{jsonType, protoType} {
		a, b, c := event(t, media, watch.Added, pod(own, "a")), event(t, media, watch.Added, pod("other", "b")), event(t, media, watch.Added, pod(own, "c"))
		src := &pieces{t, [][]byte{bytes.Join([][]byte{a, b, c[:40]}, nil), c[40:]}}
		r, err := filter.New(src, keep, filter.Options{ContentType: media, Watch: true})
		require.NoError(t, err)
		for _, want := range [][]byte{a, c} {
			got := make([]byte, 1<<20)
			n, err := r.Read(got)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got[:n]))
		}
	}
}

// Truncated input passes no foreign object, and ends with an error.
func TestTruncatedInputIsAnError(t *testing.T) {
	for name, body := range map[string][]byte{
		jsonType:  bytes.TrimSpace(encode(t, jsonType, pods(10))),
		protoType: encode(t, protoType, pods(10)),
	} {
		for i := 0; i < len(body)-4; i += 37 { // protobuf ends in two empty fields
			r, err := filter.New(bytes.NewReader(body[:i]), keep, filter.Options{ContentType: name})
			require.NoError(t, err)
			out, err := io.ReadAll(r)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF, "%s at %d", name, i)
			require.NotContains(t, string(out), "pod-1", name)
		}
	}
	for _, media := range []string{jsonType, protoType} {
		e := bytes.TrimSpace(event(t, media, watch.Added, pod(own, "a")))
		for i := 1; i < len(e); i++ {
			out, err := run(t, filter.Options{ContentType: media, Watch: true}, e[:i])
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			require.Empty(t, out)
		}
		_, err := run(t, filter.Options{ContentType: media, Watch: true}, nil)
		require.NoError(t, err)
	}
	broken := errors.New("connection reset")
	r, err := filter.New(io.MultiReader(strings.NewReader(`{"items":[{"metadata":{"namespace":"own"}},`), &failing{broken}), keep, filter.Options{ContentType: jsonType})
	require.NoError(t, err)
	out, err := io.ReadAll(r)
	require.ErrorIs(t, err, broken)
	require.JSONEq(t, `{"items":[{"metadata":{"namespace":"own"}}]}`, string(out)+"]}")
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

// Only the first event of the apiserver has the columns of a Table.
func TestFirstKeptEventHasTheColumns(t *testing.T) {
	event := func(columns, namespace string) string {
		return `{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions": ` + columns +
			`,"rows":[{"object":{"metadata":{"namespace":"` + namespace + `"}}}]}}` + "\n"
	}
	const first, second = `[{"name":"Name"}]`, `[{"name":"Age"}]`
	bookmark := `{"type":"BOOKMARK","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions":null,"rows":[]}}` + "\n"
	own := func(columns string) string { return event(columns, "own") }
	other := func(columns string) string { return event(columns, "other") }
	for _, c := range []struct{ in, want string }{
		{other(first) + other("null") + bookmark + own("null") + other("null") + own("null"), bookmark + own(first) + own("null")},
		{own(first) + other(second) + own("null"), own(first) + own("null")},
		{other(first) + own(second) + own("null"), own(second) + own("null")},
		{other("null") + own("null"), own("null")},
	} {
		out, err := run(t, filter.Options{ContentType: jsonType, Watch: true}, []byte(c.in))
		require.NoError(t, err)
		require.Equal(t, c.want, string(out))
	}
	custom := strings.ReplaceAll(other(first)+own("null"), "meta.k8s.io/", "example.com/")
	custom = strings.ReplaceAll(custom, `"rows"`, `"metadata":{"namespace":"own"},"rows"`)
	out, err := run(t, filter.Options{ContentType: jsonType, Watch: true}, []byte(custom))
	require.NoError(t, err)
	require.Equal(t, custom, string(out), "a custom resource that is called Table")
}

func TestMalformedInputIsRefused(t *testing.T) {
	frame := func(b string) string { return string([]byte{0, 0, byte(len(b) >> 8), byte(len(b))}) + b }
	list := filter.Options{ContentType: jsonType, MaxObject: 4 << 10}
	events := filter.Options{ContentType: jsonType, MaxObject: 4 << 10, Watch: true}
	protos := filter.Options{ContentType: protoType, MaxObject: 4 << 10, MaxList: 8 << 10}
	frames := filter.Options{ContentType: protoType, MaxObject: 4 << 10, Watch: true}
	const long = 64 << 10
	for _, c := range []struct {
		name string
		o    filter.Options
		in   string
		err  error
	}{
		{"no list", list, `{"kind":"Pod","metadata":{"namespace":"other"}}`, filter.ErrForm},
		{"nothing", list, ``, io.ErrUnexpectedEOF},
		{"no object", list, `[]`, filter.ErrForm},
		{"two documents", list, `{"items":[]} {}`, filter.ErrForm},
		{"items that are none", list, `{"items":{}}`, filter.ErrForm},
		{"items twice", list, `{"items":[],"items":[]}`, filter.ErrForm},
		{"items twice, spelled otherwise", list, `{"items":[],"\u0069tems":[]}`, filter.ErrForm},
		{"an item that is null", list, `{"items":[null]}`, filter.ErrForm},
		{"commas", list, `{"items":[,{}]}`, filter.ErrForm},
		{"no comma", list, `{"items":[{}{}]}`, filter.ErrForm},
		{"a comma too many", list, `{"items":[{},]}`, filter.ErrForm},
		{"metadata twice", list, `{"items":[{"metadata":{"namespace":"own"},"metadata":{"namespace":"other"}}]}`, filter.ErrForm},
		{"namespace twice", list, `{"items":[{"metadata":{"namespace":"other","namespace":"own"}}]}`, filter.ErrForm},
		{"namespace twice, spelled otherwise", list, `{"items":[{"metadata":{"namespace":"own","n\u0061mespace":"other"}}]}`, filter.ErrForm},
		{"a namespace that is no string", list, `{"items":[{"metadata":{"namespace":1}}]}`, filter.ErrForm},
		{"a namespace with a raw newline", list, "{\"items\":[{\"metadata\":{\"namespace\":\"own\n\"}}]}", filter.ErrForm},
		{"metadata that are none", list, `{"items":[{"metadata":[]}]}`, filter.ErrForm},
		{"a row without object", list, `{"kind":"Table","rows":[{"cells":[]}]}`, filter.ErrForm},
		{"a row with null", list, `{"kind":"Table","rows":[{"object":null}]}`, filter.ErrForm},
		{"a row without metadata", list, `{"kind":"Table","rows":[{"object":{}}]}`, filter.ErrForm},
		{"a long string", list, `{"items":[{"x":"` + strings.Repeat("x", long), filter.ErrSize},
		{"a long head", list, `{"x":"` + strings.Repeat("x", long) + `","items":[]}`, filter.ErrSize},
		{"long spaces", list, `{"items":[` + strings.Repeat(" ", long) + `]}`, filter.ErrSize},
		{"depth", list, `{"items":[{"x":` + strings.Repeat("[", long), filter.ErrSize},
		{"quotes", list, `{"items":[{"x":"` + strings.Repeat(`\"`, long), filter.ErrSize},

		{"an event without object", events, `{"type":"ADDED"}`, filter.ErrForm},
		{"an event with null", events, `{"type":"ADDED","object":null}`, filter.ErrForm},
		{"an event with two types", events, `{"type":"ADDED","object":{"metadata":{"namespace":"other"}},"type":"BOOKMARK"}`, filter.ErrForm},
		{"an event with two objects", events, `{"type":"ADDED","object":{"metadata":{"namespace":"own"}},"object":{}}`, filter.ErrForm},
		{"a Table without rows", events, `{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","rows":[]}}`, filter.ErrForm},
		{"a Table of two owners", events, `{"type":"ADDED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","rows":[{"object":{"metadata":{"namespace":"own"}}},{"object":{"metadata":{"namespace":"other"}}}]}}`, filter.ErrForm},
		{"a long event", events, `{"type":"ADDED","object":{"x":"` + strings.Repeat("x", long), filter.ErrSize},

		{"no magic", protos, "abcdefgh", filter.ErrForm},
		{"no list", protos, string(encode(t, protoType, pod("other", "a"))), filter.ErrForm},
		{"no kind", protos, "k8s\x00\x12\x00", filter.ErrForm},
		{"a list of endless length", protos, "k8s\x00\x0a\x0d\x0a\x02v1\x12\x07PodList\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f", io.ErrUnexpectedEOF},
		{"an item of endless length", protos, "k8s\x00\x0a\x0d\x0a\x02v1\x12\x07PodList\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + strings.Repeat("x", long), filter.ErrSize},
		{"an item longer than its list", protos, "k8s\x00\x0a\x0d\x0a\x02v1\x12\x07PodList\x12\x02\x12\x04xxxx", filter.ErrForm},
		{"a second list", protos, string(encode(t, protoType, pods(1))) + "\x12\x00", filter.ErrForm},
		{"a second type", protos, string(encode(t, protoType, pods(1))) + "\x0a\x00", filter.ErrForm},
		{"a list that is long", protos, string(encode(t, protoType, pods(200))), filter.ErrSize},

		{"an endless frame", frames, "\xff\xff\xff\xff", filter.ErrSize},
		{"an empty frame", frames, frame(""), filter.ErrForm},
		{"a frame of nonsense", frames, frame("xxxx"), filter.ErrForm},
		{"an object without magic", frames, frame("\x0a\x05ADDED\x12\x04\x0a\x02xx"), filter.ErrForm},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := run(t, c.o, []byte(c.in))
			require.ErrorIs(t, err, c.err)
			require.NotContains(t, string(out), `"other"`)
		})
	}
}

// Unusual input passes if all readers read it in the same way.
func TestUnusualEncodingsAreFiltered(t *testing.T) {
	for in, want := range map[string]string{
		`{"items":null}`:                                         `{"items":null}`,
		`{"kind":"Status","code":200}`:                           `{"kind":"Status","code":200}`,
		` { "items" : [ ] } ` + "\n\n":                           ` { "items" : [ ] } ` + "\n\n",
		`{"items":[{"metadata":{"namespace":"\u006f\u0077n"}}]}`: `{"items":[{"metadata":{"namespace":"\u006f\u0077n"}}]}`,
		`{"items":[{"m\u0065tadata":{"namespace":"other"}} , {"metadata":{"namespace":"own"}}]}`:                              `{"items":[ {"metadata":{"namespace":"own"}}]}`,
		`{"items":[{"metadata":null},{"metadata":{"namespace":null}},{"spec":{"metadata":{"namespace":"own"}}}]}`:             `{"items":[]}`,
		`{"items":[{"kind":"Table","apiVersion":"e.io/v1","rows":[1],"metadata":{"namespace":"own"}}],"rows":[],"x":[{}, 1]}`: `{"items":[{"kind":"Table","apiVersion":"e.io/v1","rows":[1],"metadata":{"namespace":"own"}}],"rows":[],"x":[{}, 1]}`,
	} {
		got, err := run(t, filter.Options{ContentType: jsonType}, []byte(in))
		require.NoError(t, err, in)
		require.Equal(t, want, string(got))
	}
	deep := `{"items":[{"metadata":{"namespace":"own"},"x":` + strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20) + `}]}`
	r, err := filter.New(strings.NewReader(deep), keep, filter.Options{ContentType: jsonType})
	require.NoError(t, err)
	got, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, deep, string(got))
}

// Hold is called for memory above the first bytes, and Give when a watch waits.
func TestHoldIsCalledBeforeBuffersGrow(t *testing.T) {
	refused := errors.New("enough")
	for _, c := range []struct {
		name   string
		o      filter.Options
		body   []byte
		asks   bool
		atMost int
	}{
		{"a list in JSON", filter.Options{ContentType: jsonType}, encode(t, jsonType, pods(500)), false, 0},
		{"a list in protobuf", filter.Options{ContentType: protoType}, encode(t, protoType, pods(5000)), true, 1 << 20},
		{"a small event", filter.Options{ContentType: jsonType, Watch: true}, event(t, jsonType, watch.Added, pod(own, "a")), false, 0},
		{"a large event", filter.Options{ContentType: jsonType, Watch: true}, []byte(`{"type":"ADDED","object":{"x":"` + strings.Repeat("x", 1<<20) + `"}}`), true, 2 << 20},
	} {
		asked, given := 0, 0
		c.o.Hold = func(n int) error { asked += n; return nil }
		c.o.Give = func(n int) { given += n }
		r, err := filter.New(bytes.NewReader(c.body), keep, c.o)
		require.NoError(t, err)
		_, err = io.ReadAll(r)
		require.NoError(t, err, c.name)
		require.Equal(t, c.asks, asked > 0, c.name)
		require.LessOrEqual(t, asked, c.atMost, c.name)
		if c.o.Watch {
			require.Equal(t, asked, given, c.name)
		}

		c.o.Hold = func(int) error { return refused }
		r, err = filter.New(bytes.NewReader(c.body), keep, c.o)
		require.NoError(t, err)
		_, err = io.ReadAll(r)
		require.Equal(t, c.asks, errors.Is(err, refused), c.name)
	}
}
