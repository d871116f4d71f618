package pipeline

import (
	"cmp"
	"net/http"
	"net/url"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/sets"
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
	real := &apirequest.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
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
		require.NoError(t, err, "it was read nevertheless: %+v", got)
		require.Equal(t, want.Verb, got.Verb)
		require.Equal(t, want.IsResourceRequest, got.IsResourceRequest)
		require.Equal(t, want.APIPrefix, got.APIPrefix)
		require.Equal(t, want.APIVersion, got.APIVersion)
		require.Equal(t, want.Path, got.Path)
		require.Equal(t, want.Parts, got.Parts)
		require.Equal(t, want.APIGroup, got.APIGroup)
		require.Equal(t, want.Resource, got.Resource)
		require.Equal(t, want.Subresource, got.Subresource)
		require.Equal(t, want.Namespace, got.Namespace)
		if want.Name != "" {
			require.Equal(t, want.Name, got.Name)
		}
	})
}

// A request into a member cluster must be what it is in that cluster, whatever a server in between
// makes of the path.
func FuzzMember(f *testing.F) {
	for _, s := range []string{
		"/api/v1/pods?watch=1", "/apis/apps/v1/namespaces/a/deployments/x/status", "/version", "/", "", "//api", "/api/v1/../../other/proxy/api/v1/pods",
		"/%2e%2e/other/proxy/api", "/api/v1/namespaces/a/pods/x/proxy/%252e%252e/y", "/clusters/other/proxy/api/v1/pods", "/api/v1/nodes/n/proxy/./x",
	} {
		f.Add("GET", s)
		f.Add("DELETE", s)
	}
	paths, err := NewClusterPaths([]string{"/clusters/*/proxy"})
	require.NoError(f, err)
	ask := func(method, target string) (*Request, bool) {
		u, err := url.ParseRequestURI(target)
		if err != nil || u.Opaque != "" || u.Host != "" {
			return nil, false
		}
		return &Request{Method: method, Query: u.RawQuery, Host: "x", Path: u.Path, Escaped: u.EscapedPath()}, true
	}
	f.Fuzz(func(t *testing.T, method, inner string) {
		r, ok := ask(method, "/clusters/own/proxy"+inner)
		if !ok {
			return
		}
		if r.Classify(paths); r.Malformed != nil || r.Cluster == "" {
			return
		}
		require.Equal(t, "own", r.Cluster)
		require.Equal(t, strings.TrimSuffix(r.Path, "/"), path.Clean(r.Path), "a server that cleans the path finds another one")
		direct, ok := ask(method, cmp.Or(strings.TrimPrefix(r.Escaped, "/clusters/own/proxy"), "/")+"?"+r.Query)
		require.True(t, ok)
		direct.Classify(paths) // the member may have members itself
		require.Nil(t, direct.Malformed)
		require.Equal(t, direct.Info, r.Info)
	})
}
