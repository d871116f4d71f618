package status

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
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

// The type of a refusal is what the apiserver's own code negotiates, if it finds one.
func FuzzNegotiate(f *testing.F) {
	for _, accept := range []string{
		"", "*/*", "application/*", "text/html, application/json;q=0.5", "application/vnd.kubernetes.protobuf,application/json",
		"application/json;as=Table;g=meta.k8s.io;v=v1,application/json", "application/json;pretty=1", "application/json;stream=watch", "application/json;sv=1,*/*;sv=", "application/yaml",
	} {
		f.Add(accept, "")
		f.Add(accept, "pretty=true")
		f.Add(accept, "a=b&pretty=0&pretty=1")
	}
	codecs := serializer.NewCodecFactory(func() *kruntime.Scheme {
		scheme := kruntime.NewScheme()
		metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
		return scheme
	}())
	f.Fuzz(func(t *testing.T, accept, query string) {
		r := &http.Request{Header: http.Header{"Accept": {accept}}, URL: &url.URL{RawQuery: query}}
		_, want, err := negotiation.NegotiateOutputMediaType(r, codecs, negotiation.DefaultEndpointRestrictions)
		mediaType, how := negotiate(accept, query)
		if require.NotNil(t, how); err != nil {
			require.Equal(t, kruntime.ContentTypeJSON, mediaType)
			return
		}
		require.Equal(t, want.MediaType, mediaType)
		require.Equal(t, want.Serializer.Identifier(), how.Identifier())
	})
}
