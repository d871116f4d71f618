package pipeline

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
)

// classify must say of every path and query what the apiserver's own reader says.
func FuzzClassify(f *testing.F) {
	for _, s := range []string{
		"/api/v1/pods?watch=1", "/apis/apps/v1/namespaces/a/deployments?fieldSelector=metadata.name%3Dx", "/api/v1/watch/pods/x",
		"/api/v1/namespaces/a/status", "/apis/a/b/proxy/c/d?watch=", "/version", "/api/v1/pods?watch=0&watch=1", "/api/v1/nodes/n/proxy//x",
	} {
		f.Add("GET", s)
		f.Add("DELETE", s)
	}
	real := &apirequest.RequestInfoFactory{APIPrefixes: resolver.APIPrefixes, GrouplessAPIPrefixes: resolver.GrouplessAPIPrefixes}
	f.Fuzz(func(t *testing.T, method, target string) {
		u, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		r := &http.Request{Method: method, URL: u, Host: "x", Header: http.Header{}}
		asked := Request{Method: method, Query: u.RawQuery, Host: r.Host}
		if u.Opaque == "" {
			asked.Path, asked.Escaped = u.Path, u.EscapedPath()
		}
		if asked.Classify(nil); asked.Malformed != nil {
			return
		}
		got := asked.Info
		want, err := real.NewRequestInfo(r)
		require.NoError(t, err)
		require.Equal(t, want.Verb, got.Verb)
		require.Equal(t, want.APIGroup, got.APIGroup)
		require.Equal(t, want.Resource, got.Resource)
		require.Equal(t, want.Subresource, got.Subresource)
		require.Equal(t, want.Namespace, got.Namespace)
		if want.Name != "" {
			require.Equal(t, want.Name, got.Name)
		}
	})
}
