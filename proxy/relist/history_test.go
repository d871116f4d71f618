package relist

import (
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func TestHistoryIgnoresEarlierVersions(t *testing.T) {
	now := time.Unix(1000, 0)
	h := &History{oldest: time.Nanosecond}
	for i, version := range []string{"9", "10", "7", "10", "100"} {
		h.See(now.Add(time.Duration(i)*time.Second), []byte(version))
		require.Equal(t, []string{"9", "10", "10", "10", "100"}[i], h.At(now.Add(time.Hour)))
	}
}

func TestHistoryKeepsBoundedVersionsOfItsDuration(t *testing.T) {
	now := time.Unix(1000, 0)
	h := &History{oldest: 128 * time.Second}
	require.Empty(t, h.At(now))
	for i := range 1000 {
		h.See(now.Add(time.Duration(i)*time.Second/2), fmt.Append(nil, i))
	}
	require.LessOrEqual(t, len(h.seen), kept+2)
	end := now.Add(499 * time.Second)
	require.Equal(t, fmt.Sprint(2*(499-100)), h.At(end.Add(-100*time.Second)))
	require.Equal(t, h.seen[0].version, h.At(now), "as old as can be")
	require.False(t, h.seen[0].at.After(end.Add(-128*time.Second)))
	version := h.At(end.Add(-10 * time.Second))
	h.Forget(version)
	require.NotEqual(t, version, h.At(now))
	for _, odd := range []string{"", "x1", "1&a=b", strings.Repeat("1", maxVersion+1)} {
		n := len(h.seen)
		h.See(end.Add(time.Hour), []byte(odd))
		require.Len(t, h.seen, n)
	}
}

// protoList encodes a list as the apiserver does.
func protoList(t testing.TB, head metav1.ListMeta, items ...metav1.PartialObjectMetadata) string {
	t.Helper()
	raw, err := (&metav1.PartialObjectMetadataList{ListMeta: head, Items: items}).Marshal()
	require.NoError(t, err)
	out, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Raw: raw}).Marshal()
	require.NoError(t, err)
	return "k8s\x00" + string(out)
}

func TestListVersionIsReadFromHeadOrTail(t *testing.T) {
	items := strings.Repeat("x", 2*maxHead)
	cut, _, _ := strings.Cut(protoList(t, metav1.ListMeta{ResourceVersion: "1444"}), "44")
	for what, c := range map[string]struct{ body, want string }{
		"built in":         {`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"12","shardInfo":{"selector":""}},"items":["` + items + `"]}`, "12"},
		"custom":           {`{"apiVersion":"a/v1","items":["` + items + `"],"kind":"L","metadata":{"continue":"","resourceVersion":"13"}}` + "\n", "13"},
		"custom, in shard": {`{"apiVersion":"a/v1","items":[],"kind":"L","metadata":{"continue":"","resourceVersion":"13","shardInfo":{"selector":"s"}}}`, "13"},
		"of an item only":  {`{"kind":"L","apiVersion":"v1","metadata":{},"items":[{"metadata":{"resourceVersion":"9"}}]}`, ""},
		"none":             {"", ""},
		"long selector":    {`{"kind":"L","apiVersion":"v1","metadata":{"resourceVersion":"15","shardInfo":{"selector":"` + items + `"}},"items":[]}`, "15"},
		"indented":         {"{\n  \"kind\": \"L\",\n  \"apiVersion\": \"v1\",\n  \"metadata\": {\n    \"resourceVersion\": \"16\"\n  },\n  \"items\": []\n}\n", "16"},
		"quoted":           {`{"apiVersion":"a/v1","items":["\"metadata\":{\"resourceVersion\":\"9\"}}"],"kind":"L"}`, ""},
		"of the last item": {`{"apiVersion":"a/v1","items":["` + items + `",{"metadata":{"resourceVersion":"9"}}]}`, ""},
		"no number":        {`{"kind":"L","apiVersion":"v1","metadata":{"resourceVersion":9},"items":[]}`, ""},
		"protobuf":         {protoList(t, metav1.ListMeta{ResourceVersion: "14", Continue: "c"}, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: items}}), "14"},
		"cut":              {cut, ""},
	} {
		t.Run(what, func(t *testing.T) {
			var got string
			r := &listVersion{Reader: httptest.NewRequest("GET", "/", strings.NewReader(c.body)).Body, see: func(v []byte) { got = string(v) }}
			out, err := io.ReadAll(r)
			require.NoError(t, err)
			require.Equal(t, c.body, string(out))
			require.Equal(t, c.want, got)
		})
	}
}

func FuzzVersionOf(f *testing.F) {
	f.Add([]byte(`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"12"},"items":[]}`))
	f.Add([]byte(protoList(f, metav1.ListMeta{ResourceVersion: "14"})))
	f.Fuzz(func(_ *testing.T, b []byte) { versionOf(b, b) })
}
