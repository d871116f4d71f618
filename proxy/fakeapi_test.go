package proxy

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
)

const (
	jsonType  = "application/json"
	protoType = "application/vnd.kubernetes.protobuf"
)

var (
	allKinds = func() *runtime.Scheme {
		s := runtime.NewScheme()
		for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, metav1.AddMetaToScheme} {
			if err := add(s); err != nil {
				panic(err)
			}
		}
		return s
	}()
	codecs = serializer.NewCodecFactory(allKinds)
)

// fakeAPI lists and watches objects of one kind in what encoding is asked for,
// as an apiserver does, with or without the gate ShardedListAndWatch.
type fakeAPI struct {
	sharded bool
	gzip    bool // whether asked to or not
	objects []metav1.PartialObjectMetadata
	recorder
}

func newFakeAPI(sharded bool, objects ...metav1.PartialObjectMetadata) *fakeAPI {
	s := &fakeAPI{sharded: sharded, objects: objects}
	s.then = s.serve
	return s
}

// object is one that the fake apiserver has. Without a namespace it is cluster-scoped.
func object(namespace, name string) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: name, UID: types.UID("uid-of-" + name), ResourceVersion: "7",
		Annotations: map[string]string{"note": `"namespace":"own-0"`},
	}}
}

var shardRange = regexp.MustCompile(`shardRange\(([a-z.]+), '(0x[0-9a-f]+)', '(0x[0-9a-f]+)'\)`)

func (s *fakeAPI) serve(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	byLabel, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var ranges []sharding.ShardRangeRequirement
	if s.sharded {
		for _, m := range shardRange.FindAllStringSubmatch(q.Get("shardSelector"), -1) {
			ranges = append(ranges, sharding.ShardRangeRequirement{Key: m[1], Start: m[2], End: m[3]})
		}
	}
	byShard := sharding.NewSelector(ranges...)
	_, namespace, _ := strings.Cut(r.URL.Path, "/namespaces/")
	namespace, _, inNamespace := strings.Cut(namespace, "/")
	var found []metav1.PartialObjectMetadata
	for _, o := range s.objects {
		owned, err := byShard.Matches(&o)
		if err == nil && owned && byLabel.Matches(labels.Set(o.Labels)) && (!inNamespace || o.Namespace == namespace) {
			found = append(found, o)
		}
	}
	media, as := negotiate(r.Header.Get("Accept"))
	w.Header().Set("Content-Type", media)
	out := io.Writer(w)
	if s.gzip {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		defer z.Close()
		out = z
	}
	if q.Get("watch") != "" {
		s.watch(w, out, r, media, as, found)
		return
	}
	head := metav1.ListMeta{ResourceVersion: "100"}
	if !byShard.Empty() {
		head.ShardInfo = &metav1.ShardInfo{Selector: byShard.String()}
	}
	if n, _ := strconv.Atoi(q.Get("limit")); n > 0 {
		from, _ := strconv.Atoi(q.Get("continue"))
		if found = found[from:]; len(found) > n {
			found, head.Continue = found[:n], strconv.Itoa(from+n)
		}
	}
	_, _ = out.Write(wire(media, listOf(as, q.Get("includeObject"), head, found)))
}

func (s *fakeAPI) watch(w http.ResponseWriter, out io.Writer, r *http.Request, media, as string, found []metav1.PartialObjectMetadata) {
	send := func(kind apiwatch.EventType, o metav1.PartialObjectMetadata) {
		_, _ = out.Write(eventOf(media, kind, one(as, o)))
		if z, ok := out.(*gzip.Writer); ok {
			_ = z.Flush()
		}
		w.(http.Flusher).Flush()
	}
	for _, o := range found {
		send(apiwatch.Added, o)
	}
	bookmark := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "100"}}
	if r.URL.Query().Get("sendInitialEvents") != "" {
		bookmark.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	}
	send(apiwatch.Bookmark, bookmark)
	<-r.Context().Done()
}

// negotiate takes the first clause that it knows.
func negotiate(accept string) (media, as string) {
	for clause := range strings.SplitSeq(accept, ",") {
		parts := strings.Split(clause, ";")
		if media = strings.TrimSpace(parts[0]); media != jsonType && media != protoType {
			continue
		}
		for _, p := range parts[1:] {
			if v, ok := strings.CutPrefix(p, "as="); ok {
				as = v
			}
		}
		return media, as
	}
	return jsonType, ""
}

func listOf(as, rows string, head metav1.ListMeta, objects []metav1.PartialObjectMetadata) runtime.Object {
	switch as {
	case "Table":
		head.ShardInfo = nil // as the apiserver does
		t := &metav1.Table{ListMeta: head, ColumnDefinitions: []metav1.TableColumnDefinition{{Name: "Name", Type: "string"}}}
		for _, o := range objects {
			t.Rows = append(t.Rows, rowOf(o, rows))
		}
		return t
	case "PartialObjectMetadataList":
		return &metav1.PartialObjectMetadataList{ListMeta: head, Items: objects}
	}
	l := &corev1.ConfigMapList{ListMeta: head}
	for _, o := range objects {
		l.Items = append(l.Items, corev1.ConfigMap{ObjectMeta: o.ObjectMeta})
	}
	return l
}

func rowOf(o metav1.PartialObjectMetadata, rows string) metav1.TableRow {
	row := metav1.TableRow{Cells: []any{o.Name}}
	if rows != "None" {
		o.TypeMeta = metav1.TypeMeta{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1"}
		row.Object.Object = &o
	}
	return row
}

func one(as string, o metav1.PartialObjectMetadata) runtime.Object {
	switch as {
	case "Table":
		return &metav1.Table{Rows: []metav1.TableRow{rowOf(o, "")}}
	case "PartialObjectMetadata":
		return &o
	}
	return &corev1.ConfigMap{ObjectMeta: o.ObjectMeta}
}

func serializerOf(media string) runtime.SerializerInfo {
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), media)
	if !ok {
		panic(media)
	}
	return info
}

func wire(media string, o runtime.Object) []byte {
	kinds, _, err := allKinds.ObjectKinds(o)
	if err != nil {
		panic(err)
	}
	out, err := runtime.Encode(codecs.EncoderForVersion(serializerOf(media).Serializer, kinds[0].GroupVersion()), o)
	if err != nil {
		panic(err)
	}
	return out
}

func eventOf(media string, kind apiwatch.EventType, o runtime.Object) []byte {
	var out bytes.Buffer
	stream := serializerOf(media).StreamSerializer
	encoder := codecs.EncoderForVersion(stream.Serializer, schema.GroupVersion{Version: "v1"})
	event := &metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: wire(media, o)}}
	if err := streaming.NewEncoder(stream.NewFrameWriter(&out), encoder).Encode(event); err != nil {
		panic(err)
	}
	return out.Bytes()
}

// listed are the objects of a list's body as a client reads them, and its continue.
func listed(t testing.TB, media string, body []byte) (names []string, more string) {
	t.Helper()
	o, err := runtime.Decode(serializerOf(media).Serializer, body)
	require.NoError(t, err, "%s", body)
	head, err := meta.ListAccessor(o)
	require.NoError(t, err)
	return namesIn(t, o), head.GetContinue()
}

func namesIn(t testing.TB, o runtime.Object) (names []string) {
	t.Helper()
	if table, ok := o.(*metav1.Table); ok {
		for _, row := range table.Rows {
			object, err := runtime.Decode(serializerOf(jsonType).Serializer, row.Object.Raw)
			require.NoError(t, err)
			names = append(names, namesIn(t, object)...)
		}
		return names
	}
	objects := []runtime.Object{o}
	if meta.IsListType(o) {
		var err error
		objects, err = meta.ExtractList(o)
		require.NoError(t, err)
	}
	for _, o := range objects {
		m, err := meta.Accessor(o)
		require.NoError(t, err)
		names = append(names, m.GetNamespace()+"/"+m.GetName())
	}
	return names
}

// watched are the objects of a watch until its first bookmark.
func (m *mesh) watched(c *http.Client, target, accept string) []string {
	m.t.Helper()
	ctx, cancel := context.WithCancel(m.t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", "https://kubernetes.default.svc"+target, nil)
	require.NoError(m.t, err)
	req.Header.Set("Accept", accept)
	resp, err := c.Do(req)
	require.NoError(m.t, err)
	defer resp.Body.Close()
	require.Equal(m.t, 200, resp.StatusCode)
	info := serializerOf(resp.Header.Get("Content-Type"))
	frames := streaming.NewDecoder(info.StreamSerializer.NewFrameReader(resp.Body),
		codecs.WithoutConversion().DecoderToVersion(info.StreamSerializer.Serializer, schema.GroupVersion{Version: "v1"}))
	events := restwatch.NewDecoder(frames, info.Serializer)
	var names []string
	for {
		kind, o, err := events.Decode()
		require.NoError(m.t, err)
		if kind == apiwatch.Bookmark {
			slices.Sort(names)
			return names
		}
		names = append(names, namesIn(m.t, o)...)
	}
}

// all lists in pieces of at most limit objects, all at once if that is 0.
func (m *mesh) all(c *http.Client, target, accept string, limit int) (names []string) {
	m.t.Helper()
	for more := ""; ; {
		a := m.with(c, "GET", fmt.Sprintf("%s?limit=%d&continue=%s", target, limit, more), "", "Accept", accept)
		require.Equal(m.t, 200, a.StatusCode, a.body)
		require.Empty(m.t, a.Header.Get("Content-Encoding"))
		var page []string
		page, more = listed(m.t, a.Header.Get("Content-Type"), []byte(a.body))
		names = append(names, page...)
		if more == "" {
			slices.Sort(names)
			return names
		}
	}
}
