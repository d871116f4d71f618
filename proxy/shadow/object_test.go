package shadow

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestChangeIsWhatDiffers(t *testing.T) {
	for name, c := range map[string]struct {
		before, after string
		ignored       []string
		want          []string
	}{
		"nothing":                     {`{"a":1,"b":[1,2]}`, `{"b":[1,2],"a":1}`, nil, nil},
		"a value":                     {`{"a":{"b":1}}`, `{"a":{"b":2}}`, nil, []string{"a.b"}},
		"a type":                      {`{"a":1}`, `{"a":"1"}`, nil, []string{"a"}},
		"empty fields say nothing":    {`{"a":{},"b":[],"c":null}`, `{}`, nil, nil},
		"items by name":               {`{"a":[{"name":"x","v":1},{"name":"y","v":2}]}`, `{"a":[{"name":"y","v":2},{"name":"x","v":1}]}`, nil, nil},
		"items by type":               {`{"a":[{"type":"x","v":1}]}`, `{"a":[{"type":"z","v":1},{"type":"x","v":1}]}`, nil, []string{"a[].type", "a[].v"}},
		"items without a name":        {`{"a":[{"v":1},{"v":2}]}`, `{"a":[{"v":1},{"v":3}]}`, nil, []string{"a[].v"}},
		"the same name twice":         {`{"a":[{"name":"x","v":1},{"name":"x","v":2}]}`, `{"a":[{"name":"x","v":1},{"name":"x","v":3}]}`, nil, []string{"a[].v"}},
		"an ignored field":            {`{"a":{"b":1},"c":1}`, `{"a":{"b":2},"c":2}`, []string{"a"}, []string{"c"}},
		"an ignored field of items":   {`{"a":[{"name":"x","v":1}]}`, `{"a":[{"name":"x","v":2}]}`, []string{"a[].v"}, nil},
		"a longer name":               {`{"ab":1}`, `{"ab":2}`, []string{"a"}, []string{"ab"}},
		"fields that the server sets": {`{"kind":"A"}`, `{"apiVersion":"v1"}`, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, Between(parse(t, c.before, c.ignored), parse(t, c.after, c.ignored)).Paths())
		})
	}
}

// parse reads an object that needs no metadata.
func parse(t *testing.T, raw string, ignored []string) *Object {
	var tree map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(raw), &tree))
	tree["metadata"] = json.RawMessage(`{"resourceVersion":"1","generation":2,"managedFields":[{"manager":"m"}]}`)
	whole, err := json.Marshal(tree)
	require.NoError(t, err)
	o, err := Parse(whole, ignored)
	require.NoError(t, err)
	return o
}

func TestCreationIsWhatTheBodyAsksFor(t *testing.T) {
	body := parse(t, `{"spec":{"a":1,"b":2},"status":{"c":3}}`, nil)
	created := parse(t, `{"spec":{"a":1,"b":4,"default":5,"clusterIP":"10.0.0.1"}}`, nil)
	require.Equal(t, []string{"spec.a"}, asked(Creation(body, created)), "a webhook changed b, and the status is not stored")
	require.Equal(t, []string{"spec.a", "spec.b", "spec.default"}, asked(Creation(nil, created)))
}

// asked returns the paths of a change besides the object's existence.
func asked(c Change) []string {
	delete(c, existence)
	return c.Paths()
}

func TestPathsAreBounded(t *testing.T) {
	fields := map[string]int{strings.Repeat("é", 200): 1}
	for i := range 20 {
		fields[fmt.Sprintf("f%02d", i)] = i
	}
	raw, err := json.Marshal(fields)
	require.NoError(t, err)
	paths := Between(parse(t, `{}`, nil), parse(t, string(raw), nil)).Paths()
	require.Len(t, paths, 8)
	paths = Between(parse(t, `{}`, nil), parse(t, `{"`+strings.Repeat("é", 200)+`":1}`, nil)).Paths()
	require.Equal(t, []string{strings.Repeat("é", 126)}, paths, "of 253 bytes, without a part of a character")
}

// A path for each of many values, below a long name or deep in a tree, would take far more than the
// object.
func TestLargeObjectsAreRefused(t *testing.T) {
	long := fmt.Sprintf(`{"metadata":{},"%s":[%s1]}`, strings.Repeat("a", 1<<16), strings.Repeat("1,", 1000))
	_, err := Parse([]byte(long), nil)
	require.ErrorIs(t, err, errLarge)

	deep := fmt.Sprintf(`{"metadata":{},"a":%s1%s}`, strings.Repeat(`{"a":`, 5000), strings.Repeat("}", 5000))
	o, err := Parse([]byte(deep), nil)
	require.NoError(t, err)
	require.Less(t, o.Size(), 16<<10)
}

func TestDeletionsBecomeDryRuns(t *testing.T) {
	for name, c := range map[string]struct{ contentType, body, want string }{
		"none":                {"", "", ""},
		"JSON":                {"application/json", `{"kind":"DeleteOptions","preconditions":{"uid":"u"}}`, `{"dryRun":["All"],"kind":"DeleteOptions","preconditions":{"uid":"u"}}`},
		"no content type":     {"", `{"propagationPolicy":"Orphan"}`, `{"dryRun":["All"],"propagationPolicy":"Orphan"}`},
		"another value":       {"application/json; charset=utf-8", `{"dryRun":[]}`, `{"dryRun":["All"]}`},
		"the same name twice": {"application/json", `{"dryRun":["All"],"dryRun":[]}`, `{"dryRun":["All"]}`},
		"protobuf": {"application/vnd.kubernetes.protobuf", "k8s\x00\n\x13\n\x02v1\x12\rDeleteOptions\x12\x02\x08\x05\x1a\x00\"\x00",
			"k8s\x00\n\x13\n\x02v1\x12\rDeleteOptions\x12\x07\x08\x05*\x03All\x1a\x00\"\x00"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := DryDeletion(c.contentType, []byte(c.body))
			require.NoError(t, err)
			require.Equal(t, c.want, string(out))
		})
	}
	for contentType, body := range map[string]string{
		"application/yaml": "dryRun: [All]", "application/cbor": "\xa0", "application/json": "[]", "application/vnd.kubernetes.protobuf": "{}", "a/b/c": "{}",
	} {
		_, err := DryDeletion(contentType, []byte(body))
		require.Error(t, err, contentType)
	}
	_, err := DryDeletion("application/json", []byte("null"))
	require.Error(t, err)
}

// Ignored fields, names in the object and how deep it is are the pod's and the users' choice.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"metadata":{"name":"a"},"spec":{"ports":[{"name":"x","port":1},{"name":"y"}]},"status":{"at":"2026-01-02T03:04:05Z"}}`), "spec.ports[].port")
	f.Add([]byte(`{"metadata":{},"a":[[[]],{"]":{"[":1}}]}`), "a[]")
	f.Fuzz(func(t *testing.T, raw []byte, ignored string) {
		o, err := Parse(raw, []string{ignored})
		if err != nil {
			return
		}
		require.Empty(t, Between(o, o))
		c := Between(&Object{}, o)
		for path, v := range c {
			require.True(t, o.shows(path, v, 0))
		}
		require.LessOrEqual(t, len(c.Paths()), 8)
		require.True(t, slices.IsSorted(c.Paths()))
	})
}
