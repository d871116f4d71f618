package compile_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// A hand-written shard writes in its own namespace alone, whichever form of selector
// names the namespace.
func TestHandWrittenShardIsFencedToItsNamespace(t *testing.T) {
	expression := func(op metav1.LabelSelectorOperator, values ...string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: v1alpha1.NamespaceLabel, Operator: op, Values: values}}}
	}
	for name, selector := range map[string]*metav1.LabelSelector{
		"matchLabels":            {MatchLabels: map[string]string{v1alpha1.NamespaceLabel: "mine"}},
		"matchLabels and others": {MatchLabels: map[string]string{v1alpha1.NamespaceLabel: "mine", "app": "foo"}},
		"In":                     expression(metav1.LabelSelectorOpIn, "mine"),
		"NotIn":                  expression(metav1.LabelSelectorOpNotIn, "foreign"),
	} {
		t.Run(name, func(t *testing.T) {
			client, url := member(t, selector)
			write := func(namespace string) int {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, url+"/api/v1/namespaces/"+namespace+"/configmaps/x", strings.NewReader("{}"))
				require.NoError(t, err)
				r.Header.Set("Content-Type", "application/json")
				resp, err := client.Do(r)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				return resp.StatusCode
			}
			require.Equal(t, http.StatusOK, write("mine"))
			require.Equal(t, http.StatusForbidden, write("foreign"))
		})
	}
}

// member is a client behind the proxy, under the policy of a hand-written shard that
// divides ConfigMaps by a selector.
func member(t *testing.T, selector *metav1.LabelSelector) (client *http.Client, url string) {
	t.Helper()
	ca, key, err := cert.GenerateSelfSignedCertKey("kubernetes.default.svc", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	require.NoError(t, err)
	leaf, err := tls.X509KeyPair(ca, key)
	require.NoError(t, err)
	api := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	api.TLS = &tls.Config{Certificates: []tls.Certificate{leaf}}
	api.StartTLS()
	t.Cleanup(api.Close)

	server, err := proxy.New(proxy.Config{
		Leaf:       func() (*tls.Certificate, error) { return &leaf, nil },
		Logger:     slog.New(slog.DiscardHandler),
		Registerer: prometheus.NewRegistry(),
	})
	require.NoError(t, err)
	require.NoError(t, server.SetCluster(&meshv1.Cluster{ServiceAddresses: []string{api.Listener.Addr().String()}, Ca: ca}))
	pod := server.Pod(proxy.PodInfo{UID: "uid", Namespace: "ns", Name: "pod"}, (&net.Dialer{}).DialContext)
	applied, err := pod.Apply(policyOf(t, selector))
	require.NoError(t, err)
	<-applied.Settled
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- pod.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = pod.Shutdown(ctx)
		require.NoError(t, <-served)
	})

	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca))
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "kubernetes.default.svc"}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}, "https://" + l.Addr().String()
}

func policyOf(t *testing.T, selector *metav1.LabelSelector) *meshv1.PodPolicy {
	t.Helper()
	shard := &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "shard"},
		Spec: v1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "operator"}},
			Limits: []v1alpha1.ObjectLimiter{{
				RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}},
				Selector:        selector,
			}},
		},
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "pod", UID: "uid",
		Labels: map[string]string{v1alpha1.EnableProxyLabel: "true", "app": "operator"},
	}}
	return compile.Compile([]*v1alpha1.ShardingConfig{shard}, []*corev1.Pod{pod}, nil, compile.Rules{}).Policies["uid"].PodPolicy
}
