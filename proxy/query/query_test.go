package query_test

import (
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/query"
)

func TestSetKeepsEveryOtherByte(t *testing.T) {
	for _, c := range []struct{ name, raw, want string }{
		{"absent", "limit=5&a=b", "limit=5&a=b&k=v+1"},
		{"empty query", "", "k=v+1"},
		{"in place", "a=%7e&k=old&b=x=y", "a=%7e&k=v+1&b=x=y"},
		{"no value", "a&k&b", "a&k=v+1&b"},
		{"later values dropped", "k=1&a=2&k=3", "k=v+1&a=2"},
		{"encoded key", "%6B=1&a=2", "k=v+1&a=2"},
		{"duplicates of others stay", "a=2&a=1", "a=2&a=1&k=v+1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := query.Set(c.raw, "k", "v 1")
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestMalformedQueriesAreErrors(t *testing.T) {
	for _, raw := range []string{"a=%zz", "%=1", "a=1;k=2", "k=%"} {
		_, _, err := query.Get(raw, "k")
		require.Error(t, err, raw)
		_, err = query.Set(raw, "k", "v")
		require.Error(t, err, raw)
	}
}

func FuzzSet(f *testing.F) {
	f.Add("a=b&k=c&k=d", "v")
	f.Add("%6b=1&&=", "a=b,c in (d)")
	f.Fuzz(func(t *testing.T, raw, value string) {
		want, parseErr := url.ParseQuery(raw)
		out, err := query.Set(raw, "k", value)
		if (parseErr == nil) != (err == nil) {
			t.Fatalf("%q: net/url says %v, we say %v", raw, parseErr, err)
		}
		if err != nil {
			return
		}
		got, err := url.ParseQuery(out)
		require.NoError(t, err)
		want["k"] = []string{value}
		require.Equal(t, want, got)
		first, ok, err := query.Get(out, "k")
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, value, first)
	})
}

func TestDeleteKeepsEveryOtherByte(t *testing.T) {
	got, err := query.Delete("a=%7e&%6B=1&b=x=y&k&other=2&a", "k", "other")
	require.NoError(t, err)
	require.Equal(t, "a=%7e&b=x=y&a", got)
}
