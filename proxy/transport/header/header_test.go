package header_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

func TestFields(t *testing.T) {
	f := header.Fields{{Name: "Accept", Value: "a"}, {Name: "Warning", Value: "1"}, {Name: "Accept", Value: "b"}}
	require.Equal(t, "a", f.Get("Accept"))
	require.Equal(t, []string{"a", "b"}, f.Values("Accept"))
	first, n := f.Count("Accept")
	require.Equal(t, "a", first)
	require.Equal(t, 2, n)
	require.True(t, f.Has("Warning"))
	require.Nil(t, f.Values("Host"))
	require.Empty(t, f.Get("Host"))
	require.EqualValues(t, 3*128+len("Accept")+len("Warning")+len("Accept")+3, f.Weight())

	f.Set("Accept", "c")
	f.Set("Host", "h")
	require.Equal(t, header.Fields{{Name: "Accept", Value: "c"}, {Name: "Warning", Value: "1"}, {Name: "Host", Value: "h"}}, f)
	f.Drop("Warning", "Host")
	require.Equal(t, header.Fields{{Name: "Accept", Value: "c"}}, f)
}

func TestTrailerNames(t *testing.T) {
	require.Equal(t, []string{"X-Sum", "X-B"}, header.TrailerNames([]string{"x-sum, ,Content-Length, X-SUM", "X-b"}))
	require.Nil(t, header.TrailerNames(nil))
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("x-%d", i))
	}
	require.Len(t, header.TrailerNames(many), 64)
}

func TestFieldsOfNetHTTP(t *testing.T) {
	h := map[string][]string{"Accept": {"a", "b"}, "Warning": {"1"}}
	f := header.Of(h)
	require.Equal(t, []string{"a", "b"}, f.Values("Accept"))
	back := map[string][]string{"Accept": {"0"}}
	f.AddTo(back)
	require.Equal(t, map[string][]string{"Accept": {"0", "a", "b"}, "Warning": {"1"}}, back)
	require.Nil(t, header.Of(nil))
}
