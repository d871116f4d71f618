package command

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api/v1"
	"sigs.k8s.io/yaml"
)

// bare answers as an apiserver without the mesh, whose clock is an hour behind.
func bare(t *testing.T) http.Handler {
	groupVersion := metav1.GroupVersionForDiscovery{GroupVersion: "apps/v1", Version: "v1"}
	answers := map[string]any{
		"/version": version.Info{GitVersion: "v1.36.3"},
		"/api":     metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}},
		"/apis": metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}, Groups: []metav1.APIGroup{
			{Name: "apps", Versions: []metav1.GroupVersionForDiscovery{groupVersion}, PreferredVersion: groupVersion},
		}},
		"/api/v1": metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: "v1", APIResources: []metav1.APIResource{
			{Name: "pods", SingularName: "pod", Namespaced: true, Kind: "Pod", Verbs: metav1.Verbs{"get", "list"}},
		}},
		"/apis/apps/v1": metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: "apps/v1", APIResources: []metav1.APIResource{
			{Name: "deployments", SingularName: "deployment", Namespaced: true, Kind: "Deployment", Verbs: metav1.Verbs{"get"}},
			{Name: "daemonsets", SingularName: "daemonset", Namespaced: true, Kind: "DaemonSet", Verbs: metav1.Verbs{"get"}},
		}},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, http.MethodGet, r.Method)
		assert.Equal(t, "kubectl-ctrlmesh/v0", r.UserAgent())
		answer, found := answers[r.URL.Path]
		if !found && strings.HasSuffix(r.URL.Path, "/pods") {
			answer, found = metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}}, true
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Date", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat))
		if !found {
			w.WriteHeader(http.StatusNotFound)
			answer = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
		}
		assert.NoError(t, json.NewEncoder(w).Encode(answer))
	})
}

// kubeconfig returns the path of a kubeconfig for a server.
func kubeconfig(t *testing.T, server string) string {
	t.Helper()
	text, err := yaml.Marshal(clientcmdapi.Config{
		Kind: "Config", APIVersion: "v1", CurrentContext: "a",
		Clusters: []clientcmdapi.NamedCluster{{Name: "a", Cluster: clientcmdapi.Cluster{Server: server}}},
		Contexts: []clientcmdapi.NamedContext{{Name: "a", Context: clientcmdapi.Context{Cluster: "a", Namespace: "team"}}},
	})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	return file
}

// The kinds of the mesh are absent from the discovery of the apiserver, which is no error.
func TestClusterWithoutTheMeshIsReadOverHTTP(t *testing.T) {
	server := httptest.NewServer(bare(t))
	defer server.Close()
	for args, want := range map[string]result{
		"status":      {"there is no Deployment ctrlmesh-manager in namespace ctrlmesh-system", "", Found},
		"check":       {"error    mesh-missing: neither Deployment ctrlmesh-manager nor DaemonSet", "", Found},
		"shards root": {"", "there is no ShardingConfig root in namespace team", Unknown},
		"version":     {"kubernetes  v1.36.3", "", Healthy},
	} {
		t.Run(args, func(t *testing.T) {
			var out, errs bytes.Buffer
			streams := genericiooptions.IOStreams{In: strings.NewReader(""), Out: &out, ErrOut: &errs}
			code := Run(t.Context(), streams, "v0", append(strings.Fields(args), "--kubeconfig", kubeconfig(t, server.URL)))
			require.Equal(t, want.code, code, "%s%s", out.String(), errs.String())
			require.Contains(t, out.String(), want.out)
			require.Contains(t, errs.String(), want.err)
		})
	}
}

func TestClockIsThatOfTheApiserver(t *testing.T) {
	server := httptest.NewServer(bare(t))
	defer server.Close()
	e := newEnvironment(genericiooptions.IOStreams{}, "v0")
	*e.flags.KubeConfig = kubeconfig(t, server.URL)
	r, namespace, err := e.dial()
	require.NoError(t, err)
	require.Equal(t, "team", namespace)
	s, err := r.Read(t.Context())
	require.NoError(t, err)
	require.InDelta(t, -time.Hour.Seconds(), time.Until(s.Now).Seconds(), 5)
}

// The log of an agent is followed without a timeout, and warnings of the apiserver are kept.
func TestLogsAreFollowedOverHTTP(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/api/v1/namespaces/ctrlmesh-system/pods/agent/log", r.URL.Path)
		assert.Equal(t, "follow=true&tailLines=0", r.URL.RawQuery)
		w.Header().Set("Warning", `299 - "the node is old"`)
		_, err := w.Write([]byte("a line\n"))
		assert.NoError(t, err)
	}))
	defer server.Close()
	e := newEnvironment(genericiooptions.IOStreams{}, "v0")
	*e.flags.KubeConfig = kubeconfig(t, server.URL)
	log, err := e.follow(t.Context(), "ctrlmesh-system", "agent", &corev1.PodLogOptions{Follow: true, TailLines: new(int64(0))})
	require.NoError(t, err)
	defer log.Close()
	text, err := io.ReadAll(log)
	require.NoError(t, err)
	require.Equal(t, "a line\n", string(text))
	require.Equal(t, []string{"the node is old"}, e.warnings.take())
}
