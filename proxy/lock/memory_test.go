package lock_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

const (
	patchType = "application/json-patch+json"
	applyType = "application/apply-patch+yaml"
)

// noise is what the runtime and the race detector allocate beside a call.
const noise = 256 << 10

// allocated returns how many bytes f allocates, those included that are garbage at once.
func allocated(f func()) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int(after.TotalAlloc - before.TotalAlloc)
}

// readAll reads a body in all the ways in which the proxy does. The error is that of an edit.
func readAll(t *testing.T, contentType string, body []byte) error {
	t.Helper()
	lock.ReadRequest(contentType, body)
	_, _, _ = lock.FindRecord("leases", contentType, body)
	lock.ReadHeld(contentType, body)
	_, err := newLock(t).Request(contentType, body)
	return err
}

func repeat(begin, part, end string, size int) []byte {
	return []byte(begin + strings.TrimSuffix(strings.Repeat(part, size/len(part)), ",") + end)
}

func TestReadingTakesMemoryOfTheOrderOfTheBody(t *testing.T) {
	const size = 256 << 10
	envelope, err := (&k8sruntime.Unknown{
		TypeMeta: k8sruntime.TypeMeta{Kind: "Lease"},
		Raw:      protowire.AppendBytes([]byte{0x0a}, bytes.Repeat([]byte{0x6a, 0}, size/2)),
	}).Marshal()
	require.NoError(t, err)
	for name, c := range map[string]struct {
		contentType string
		body        []byte
	}{
		"small members":       {jsonType, repeat(`{"metadata":{"annotations":{`, `"a":"",`, `}}}`, size)},
		"small elements":      {jsonType, repeat(`{"metadata":[`, `{},`, `]}`, size)},
		"merge patch":         {"application/merge-patch+json", repeat(`{"spec":{"x":[`, `[],`, `]}}`, size)},
		"empty operations":    {patchType, repeat(`[`, `{},`, `]`, size)},
		"elements of a patch": {patchType, repeat(`[{"op":"add","path":"","value":[`, `[],`, `]}]`, size)},
		"apply as JSON":       {applyType, repeat(`{"metadata":{"name":"op"},"x":[`, `{},`, `]}`, size)},
		"protobuf":            {protoType, append([]byte("k8s\x00"), envelope...)},
	} {
		t.Run(name, func(t *testing.T) {
			used := allocated(func() { _ = readAll(t, c.contentType, c.body) })
			require.Less(t, used, 48*len(c.body))
		})
	}
}

func TestYAMLThatMultipliesIsRefused(t *testing.T) {
	text := strings.Repeat("x", 8<<10)
	for name, body := range map[string]string{
		"aliases":                 "a: &a " + text + "\nspec: [" + strings.Repeat("*a,", 1000) + "]",
		"aliases behind a tag":    "a: !!str &a " + text + "\nspec: {b: *a, c: *a}",
		"alias behind a line":     "a:\n  &a " + text + "\nspec:\r- *a\n-\t*a",
		"alias behind a NEL":      "a: &a " + text + "\nspec:\u0085 - b\u0085 -\u0085*a",
		"merge keys":              "a: &a {b: c}\nspec: {<<: *a}",
		"anchor at the beginning": "&a [" + text + "]",
		"prefixes of tags":        "%TAG ! " + text + "\n---\nspec: [" + strings.Repeat("!a b,", 1000) + "]",
		"UTF-16":                  "\xff\xfea\x00:\x00 \x00&\x00a\x00 \x00b\x00",
		"many values":             "spec: [" + strings.Repeat("a,", 4096) + "]",
		"depth":                   "spec: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000),
		"size":                    "spec: " + strings.Repeat(text, 9),
	} {
		t.Run(name, func(t *testing.T) {
			for _, contentType := range []string{"application/yaml", applyType} {
				var err error
				used := allocated(func() { err = readAll(t, contentType, []byte(body)) })
				require.ErrorIs(t, err, lock.ErrYAML)
				require.Less(t, used, 16*len(body)+noise)
				_, _, err = lock.FindRecord("leases", contentType, []byte(body))
				require.ErrorIs(t, err, lock.ErrYAML)
			}
		})
	}
}

// The weight is charged to the pod before the body is read.
func TestYAMLTakesNoMoreThanItsWeight(t *testing.T) {
	for name, body := range map[string]string{
		"elements":       "spec: [" + strings.Repeat("a,", 4000) + "]",
		"pairs":          "spec: [" + strings.Repeat("a: ,", 2000) + "]",
		"block pairs":    "spec:\n" + strings.Repeat("- ? a\n", 2000),
		"nested":         "spec: " + strings.Repeat("[", 4000) + strings.Repeat("]", 4000),
		"nested blocks":  strings.Repeat("- ", 4000) + "a",
		"block sequence": "spec:\n" + strings.Repeat("- a\n", 4000),
		"a lease":        "metadata: {name: op}\nspec:\n  holderIdentity: a\n",
		"members":        "spec: {" + strings.Join(numbered(1300), ": b, ") + ": b}",
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			used := allocated(func() { _, _, err = lock.FindRecord("leases", applyType, []byte(body)) })
			require.NoError(t, err)
			weight := int(lock.Weight(applyType, []byte(body)))
			require.Less(t, used, weight+16*len(body)+noise)
		})
	}
	require.Zero(t, lock.Weight(applyType, []byte(`{"a":["b","c"]}`)), "JSON")
	require.Zero(t, lock.Weight(jsonType, []byte(`a: b`)))
}

func numbered(n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprint("a", i))
	}
	return out
}

func TestJSONPatchesAreBounded(t *testing.T) {
	of := func(n int) []byte {
		return repeat("[", `{"op":"test","path":"/metadata/name","value":"op"},`, "]", n*len(`{"op":"test","path":"/metadata/name","value":"op"},`))
	}
	got, err := newLock(t).Request(patchType, of(10000))
	require.NoError(t, err)
	require.True(t, got.Lock)
	require.Equal(t, 10000, bytes.Count(got.Bytes, []byte(`"op---s1"`)))
	require.True(t, json.Valid(got.Bytes))
	_, err = newLock(t).Request(patchType, of(10001))
	require.ErrorContains(t, err, "more than 10000 operations")
}

func TestVersionIsReadAsTheAPIServerReadsIt(t *testing.T) {
	const merge = "application/merge-patch+json"
	for _, c := range []struct{ name, contentType, body, want string }{
		{"object", jsonType, `{"metadata":{"resourceVersion":"7"}}`, "7"},
		{"member in another case", jsonType, `{"metadata":{"ResourceVersion":"7"}}`, ""},
		{"metadata in another case", jsonType, `{"Metadata":{"resourceVersion":"7"}}`, ""},
		{"both cases", jsonType, `{"metadata":{"resourceVersion":"7","RESOURCEVERSION":"8"}}`, "7"},
		{"escaped", jsonType, `{"metadata":{"resource\u0056ersion":"7"}}`, "7"},
		{"twice", jsonType, `{"metadata":{"resourceVersion":"7","resourceVersion":"8"}}`, "8"},
		{"metadata twice in a patch", merge, `{"metadata":{"resourceVersion":"7"},"metadata":{}}`, ""},
		{"null last in a patch", merge, `{"metadata":{"resourceVersion":"7","resourceVersion":null}}`, ""},
		{"YAML", "application/yaml", "metadata: {resourceVersion: '7'}", "7"},
		{"YAML in another case", "application/yaml", "metadata: {ResourceVersion: '7'}", ""},
		{"added", patchType, `[{"op":"add","path":"/metadata/resourceVersion","value":"7"}]`, "7"},
		{"operation in another case", patchType, `[{"Op":"add","path":"/metadata/resourceVersion","value":"7"}]`, ""},
		{"value in another case", patchType, `[{"op":"add","path":"/metadata","Value":{"resourceVersion":"7"}}]`, ""},
		{"added and removed", patchType, `[{"op":"add","path":"/metadata/resourceVersion","value":"7"},{"op":"remove","path":"/metadata/resourceVersion"}]`, ""},
		{"added and moved", patchType, `[{"op":"add","path":"/metadata/resourceVersion","value":"7"},{"op":"move","from":"/metadata/resourceVersion","path":"/metadata/name"}]`, ""},
		{"added and overwritten", patchType, `[{"op":"add","path":"/metadata/resourceVersion","value":"7"},{"op":"copy","from":"/kind","path":"x/metadata/resourceVersion"}]`, ""},
	} {
		_, version := lock.ReadRequest(c.contentType, []byte(c.body))
		require.Equal(t, c.want, version, c.name)
	}
}

// FuzzYAML checks that whatever is read without a refusal takes no more than its weight.
func FuzzYAML(f *testing.F) {
	f.Add("metadata: {name: op}\nspec:\n- ? [a, 'b']\n  : |\n   c\n")
	f.Add("a: !!binary YQ==\n<<: {b: 1}\n---\nc")
	f.Add("a: &b c\nd: *b")
	f.Fuzz(func(t *testing.T, in string) {
		body := []byte(in)
		var err error
		used := allocated(func() { _, err = newLock(t).Request(applyType, body) })
		if err == nil {
			require.LessOrEqual(t, used, int(lock.Weight(applyType, body))+64*len(body)+128<<10)
		}
	})
}
