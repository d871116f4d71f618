package fields_test

import (
	"encoding/json"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

func TestMembersOfAnObject(t *testing.T) {
	const in = ` { "a" : "}\"\\" , "\u0062":[ {"]":1} ] ,"c":-1e5,"":{},"d":null }`
	got := map[string]string{}
	n, ok := fields.Members([]byte(in), func(m fields.Member) {
		require.Equal(t, in[m.From:m.To], string(m.Value))
		got[string(m.Key)] = string(m.Value)
	})
	require.True(t, ok)
	require.Equal(t, 5, n)
	require.Equal(t, map[string]string{"a": `"}\"\\"`, "b": `[ {"]":1} ]`, "c": "-1e5", "": "{}", "d": "null"}, got)
	for _, other := range []string{"[]", "1", ` "{"`, "null"} {
		_, ok := fields.Members([]byte(other), func(fields.Member) { t.Fatal("a member") })
		require.False(t, ok, other)
	}
}

func TestElementsOfAnArray(t *testing.T) {
	const in = ` [ 1,"],", [2] ,{"a":[]} ] `
	var got []string
	ok, err := fields.Elements([]byte(in), func(value []byte, from, to int) error {
		require.Equal(t, in[from:to], string(value))
		got = append(got, string(value))
		return nil
	})
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, []string{"1", `"],"`, "[2]", `{"a":[]}`}, got)
	ok, err = fields.Elements([]byte("[1,2]"), func([]byte, int, int) error { return io.EOF })
	require.True(t, ok)
	require.ErrorIs(t, err, io.EOF)
	for _, other := range []string{"{}", "null", `"["`} {
		ok, _ := fields.Elements([]byte(other), nil)
		require.False(t, ok, other)
	}
}

func TestEditReplacesParts(t *testing.T) {
	in := []byte("abcdef")
	e := fields.NewEdit(in)
	out, changed := e.Result()
	require.False(t, changed)
	require.Equal(t, in, out)
	e.Replace(0, 1, []byte("A1"))
	e.Replace(3, 3, []byte("-"))
	e.Replace(5, 6, nil)
	out, changed = e.Result()
	require.True(t, changed)
	require.Equal(t, "A1bc-de", string(out))
	require.Equal(t, "abcdef", string(in))
}

func TestAppendKeepsTheRestOfTheEnvelope(t *testing.T) {
	in := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Pod"}, Raw: []byte("\x12\x01x"), ContentType: "y"}
	b, err := in.Marshal()
	require.NoError(t, err)
	for _, body := range [][]byte{b, nil} {
		envelope, err := fields.Open(append([]byte(fields.Magic), body...))
		require.NoError(t, err)
		var before, after runtime.Unknown
		require.NoError(t, before.Unmarshal(body))
		require.NoError(t, after.Unmarshal(envelope.Append(1, []byte("z"))[len(fields.Magic):]))
		before.Raw = append(before.Raw, "\x0a\x01z"...)
		require.Equal(t, before, after)
		require.Equal(t, before.Kind, envelope.Kind)
	}
}

func TestFieldsOfOtherTypesAreErrors(t *testing.T) {
	for _, message := range []string{"\x08\x05", "\x10\x05", "\xff", "\x0a\x05x"} {
		_, err := fields.Open([]byte(fields.Magic + message))
		require.ErrorIs(t, err, fields.ErrProto, "%q", message)
	}
	_, err := fields.Open([]byte("k8s"))
	require.ErrorIs(t, err, fields.ErrProto)
	f := fields.Field{Type: protowire.BytesType}
	_, err = f.Varint()
	require.ErrorIs(t, err, fields.ErrProto)
}

// FuzzMembers checks that members are what encoding/json reads.
func FuzzMembers(f *testing.F) {
	f.Add([]byte(`{"a":"\\\"","b" : [{"}":1}] , "\u0063":null}`))
	f.Add([]byte(` [ {} ] `))
	f.Fuzz(func(t *testing.T, in []byte) {
		if !json.Valid(in) {
			return
		}
		got := map[string]json.RawMessage{}
		_, ok := fields.Members(in, func(m fields.Member) {
			require.True(t, json.Valid(m.Value))
			got[string(m.Key)] = m.Value
		})
		var want map[string]json.RawMessage
		if err := json.Unmarshal(in, &want); err != nil || want == nil {
			require.False(t, ok)
			return
		}
		require.True(t, ok)
		for key, value := range got {
			var decoded string // invalid UTF-8 is kept, and nothing compares equal to it
			quoted, _ := json.Marshal(key)
			require.NoError(t, json.Unmarshal(quoted, &decoded))
			if decoded == key {
				require.Equal(t, string(want[key]), string(value))
			}
		}
	})
}
