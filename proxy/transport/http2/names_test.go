package http2

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2/hpack"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// Any decoder reads what is encoded.
func TestEncodesResponses(t *testing.T) {
	var fields header.Fields
	want := []hpack.HeaderField{{Name: ":status", Value: "200"}, {Name: ":status", Value: "409"}}
	for canonical := range byCanonical {
		fields = append(fields, header.Field{Name: canonical, Value: "v"})
		want = append(want, hpack.HeaderField{Name: strings.ToLower(canonical), Value: "v"})
	}
	for _, size := range []int{0, 1, 126, 127, 128, 254, 255, 256, 127 + 1<<14, 1 << 16} {
		fields = append(fields, header.Field{Name: "X-Other", Value: strings.Repeat("x", size)})
		want = append(want, hpack.HeaderField{Name: "x-other", Value: strings.Repeat("x", size)})
	}
	fields = append(fields, header.Field{Name: "Connection", Value: "close"}, header.Field{Name: "X-Bad", Value: "a\nb"}, header.Field{Name: "A b", Value: "x"})
	var got []hpack.HeaderField
	dec := hpack.NewDecoder(4096, func(f hpack.HeaderField) { got = append(got, f) })
	_, err := dec.Write(appendFields(appendStatus(appendStatus([]byte{emptyTable}, http.StatusOK), http.StatusConflict), fields))
	require.NoError(t, err)
	require.NoError(t, dec.Close())
	require.Equal(t, want, got)
}
