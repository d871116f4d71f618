package filter_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// readItems returns the keys of a list's objects, and events about all of them with a
// bookmark at the end.
func readItems(src io.Reader, media string) (keys []string, stream []byte, err error) {
	items, err := filter.NewItems(src, filter.Options{ContentType: media})
	for err == nil {
		var item filter.Item
		if item, err = items.Next(); err != nil {
			break
		}
		keys = append(keys, string(item.Key.Namespace)+"/"+string(item.Key.Name)+"/"+string(item.Key.UID))
		var event []byte
		event, err = items.Event("ADDED", item)
		stream = append(stream, event...)
	}
	if !errors.Is(err, io.EOF) {
		return keys, stream, err
	}
	mark, err := items.Bookmark()
	return keys, append(stream, mark...), err
}

// Clients read the same objects from the events as from a watch of the apiserver.
func TestItemsOfAllKindsBecomeEvents(t *testing.T) {
	lists := listsOfAllKinds(t, "ns", "ns")
	for gvk, o := range lists {
		objects, err := meta.ExtractList(o)
		require.NoError(t, err)
		for _, media := range []string{jsonType, protoType} {
			keys, stream, err := readItems(bytes.NewReader(encode(t, media, o)), media)
			require.NoError(t, err, "%s %s", gvk, media)
			require.Equal(t, []string{"ns/0/", "ns/1/"}, keys)
			got, err := events(media, stream)
			require.ErrorIs(t, err, io.EOF, "%s %s", gvk, media)
			require.Len(t, got, 3)
			for i, e := range got[:2] {
				require.Equal(t, watch.Added, e.kind)
				want, err := decode(media, encode(t, media, objects[i]))
				require.NoError(t, err)
				if gvk.Group == "meta.k8s.io" { // encode uses one version for all
					e.object.GetObjectKind().SetGroupVersionKind(want.GetObjectKind().GroupVersionKind())
				}
				require.Equal(t, want, e.object, "%s %s", gvk, media)
			}
			require.Equal(t, watch.Bookmark, got[2].kind)
			mark, err := meta.Accessor(got[2].object)
			require.NoError(t, err)
			require.Equal(t, "7", mark.GetResourceVersion())
			require.Equal(t, gvk.Group, got[2].object.GetObjectKind().GroupVersionKind().Group)
			require.Equal(t, strings.TrimSuffix(gvk.Kind, "List"), got[2].object.GetObjectKind().GroupVersionKind().Kind)
		}
	}
	require.Greater(t, len(lists), 100)
}

const customList = `{"apiVersion":"e.io/v1","items":[ {"apiVersion":"e.io/v1","kind":"X","metadata":{"name":"a","uid":"1"}} , {"apiVersion":"e.io/v1","kind":"X","metadata":{"name":"b"}}],"kind":"XList","metadata":{"resourceVersion":"9","continue":""}}` + "\n"

// Lists of custom resources name their kind and version after the items.
func TestItemsOfCustomResources(t *testing.T) {
	keys, stream, err := readItems(strings.NewReader(customList), jsonType)
	require.NoError(t, err)
	require.Equal(t, []string{"/a/1", "/b/"}, keys)
	require.Equal(t, `{"type":"ADDED","object":{"apiVersion":"e.io/v1","kind":"X","metadata":{"name":"a","uid":"1"}}}
{"type":"ADDED","object":{"apiVersion":"e.io/v1","kind":"X","metadata":{"name":"b"}}}
{"type":"BOOKMARK","object":{"kind":"X","apiVersion":"e.io/v1","metadata":{"resourceVersion":"9"}}}
`, string(stream))
}

// whole returns a list that is not to be continued.
func whole(l *corev1.PodList) *corev1.PodList {
	l.Continue = ""
	return l
}

func TestEmptyListsHaveABookmark(t *testing.T) {
	for _, body := range []string{
		`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[]}`,
		`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":null}`,
	} {
		_, stream, err := readItems(strings.NewReader(body), jsonType)
		require.NoError(t, err)
		require.Contains(t, string(stream), `"BOOKMARK"`)
	}
	l := whole(pods(0))
	_, stream, err := readItems(bytes.NewReader(encode(t, protoType, l)), protoType)
	require.NoError(t, err)
	got, err := events(protoType, stream)
	require.ErrorIs(t, err, io.EOF)
	require.Len(t, got, 1)
}

// A part of a list is never taken for all of it.
func TestIncompleteListsAreErrors(t *testing.T) {
	for media, body := range map[string][]byte{
		jsonType: []byte(strings.TrimSpace(customList)), protoType: encode(t, protoType, whole(pods(3))),
	} {
		size, more := len(body), " x"
		if media == protoType {
			size -= 4 // two empty fields behind the list
			more = "\x12\x00"
		}
		for n := range size {
			_, _, err := readItems(bytes.NewReader(body[:n]), media)
			require.Error(t, err, "%s %d of %d", media, n, len(body))
		}
		_, _, err := readItems(io.MultiReader(bytes.NewReader(body), strings.NewReader(more)), media)
		require.Error(t, err, media)
	}
}

func TestListsWithoutItemsOfOneKindAreErrors(t *testing.T) {
	for _, body := range []string{
		`{}`, `[]`, `null`, `{"kind":"Status","apiVersion":"v1"}`,
		`{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[]}`,
		`{"kind":"PodList","apiVersion":"v1","items":[]}`,
		`{"kind":"PodList","apiVersion":"v1","items":[{}]}`,
		`{"kind":"PodList","apiVersion":"v1","items":[{"metadata":{"name":""}}]}`,
		`{"kind":"PodList","apiVersion":"v1","items":[{"kind":"Pod","metadata":{"name":"a"}}]}`,
		`{"items":[{"metadata":{"name":"a"}}],"kind":"PodList","apiVersion":"v1"}`,
		`{"kind":"PodList","apiVersion":"v1","items":[],"items":[]}`,
		`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9","continue":"more"},"items":[]}`,
		`{"kind":"Table","apiVersion":"meta.k8s.io/v1","rows":[]}`,
	} {
		_, _, err := readItems(strings.NewReader(body), jsonType)
		require.Error(t, err, body)
	}
	_, _, err := readItems(bytes.NewReader(encode(t, protoType, pods(3))), protoType)
	require.ErrorIs(t, err, filter.ErrForm) // to be continued
	_, _, err = readItems(strings.NewReader(""), "application/cbor")
	require.ErrorIs(t, err, filter.ErrType)
}

func FuzzItems(f *testing.F) {
	f.Add([]byte(customList), false)
	f.Add([]byte(`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[{"metadata":{"name":"a"}}]}`), false)
	f.Fuzz(func(t *testing.T, body []byte, protobuf bool) {
		media := jsonType
		if protobuf {
			media = protoType
		}
		keys, stream, err := readItems(bytes.NewReader(body), media)
		if err != nil {
			return
		}
		r, err := filter.NewEvents(bytes.NewReader(stream), filter.Options{ContentType: media})
		require.NoError(t, err)
		for _, want := range keys {
			e, err := r.Next()
			require.NoError(t, err)
			require.Equal(t, "ADDED", string(e.Kind))
			require.Equal(t, want, string(e.Key.Namespace)+"/"+string(e.Key.Name)+"/"+string(e.Key.UID))
		}
		e, err := r.Next()
		require.NoError(t, err)
		require.Equal(t, "BOOKMARK", string(e.Kind))
		_, err = r.Next()
		require.ErrorIs(t, err, io.EOF)
	})
}
