package status

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A refusal costs what it says, however much the client had to say about types.
func TestRefusalAllocatesLittle(t *testing.T) {
	refusal := BadRequest("no")
	for name, c := range map[string]struct{ accept, query string }{
		"usual":          {"application/vnd.kubernetes.protobuf,application/json", "pretty=true"},
		"long Accept":    {strings.Repeat("a/b;c=d,", 16<<10), ""},
		"long query":     {"", "pretty&" + strings.Repeat("a&", 64<<10)},
		"many in quotes": {`a/b;c="` + strings.Repeat(`\"`, 64<<10), ""},
	} {
		r := httptest.NewRequest(http.MethodGet, "/x?"+c.query, nil)
		r.Header.Set("Accept", c.accept)
		const times = 10
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range times {
			w := httptest.NewRecorder()
			Write(w, r, refusal)
			require.Equal(t, http.StatusBadRequest, w.Code)
		}
		runtime.ReadMemStats(&after)
		cost := int(after.TotalAlloc-before.TotalAlloc) / times
		t.Logf("hostile: attack=%q bytes_per_refusal=%d", name, cost)
		require.Less(t, cost, 32<<10, name)
	}
}

func TestTypesAreNegotiated(t *testing.T) {
	for accept, want := range map[string]string{
		"":                                    "application/json",
		"application/vnd.kubernetes.protobuf": "application/vnd.kubernetes.protobuf",
		"text/html":                           "application/json",
		"application/vnd.kubernetes.protobuf," + strings.Repeat("a/b,", maxNegotiated): "application/json",
	} {
		r := httptest.NewRequest(http.MethodGet, "/x", nil)
		r.Header.Set("Accept", accept)
		w := httptest.NewRecorder()
		Write(w, r, BadRequest("no"))
		require.Equal(t, want, w.Header().Get("Content-Type"))
	}
}
