package reviews

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

func TestCreateFindsWhoAnswered(t *testing.T) {
	mutated, validated := v2.Reviewer{Version: Next, Pod: "next-0"}, v2.Reviewer{Version: Stable, Pod: "stable-0"}
	apiserver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		paper := &v2.Paper{}
		if json.NewDecoder(r.Body).Decode(paper) != nil || r.URL.Path != "/apis/reviewer.example.com/v2/namespaces/ns/papers" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := validated.Refusal(paper); err != nil {
			refused := apierrors.NewForbidden(v2.GroupVersion.WithResource("papers").GroupResource(), "p", err)
			refused.ErrStatus.APIVersion, refused.ErrStatus.Kind = "v1", "Status"
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(refused.ErrStatus)
			return
		}
		paper.Name = paper.GenerateName + "x" + r.URL.Query().Get("dryRun")
		mutated.Mark(paper)
		w.Header().Set("Warning", `299 - "`+validated.Warning()+`"`)
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(paper)
	}))
	t.Cleanup(apiserver.Close)
	s := newSite(t)
	clientset, err := kubernetes.NewForConfig(&rest.Config{Host: apiserver.URL, QPS: -1, WarningHandler: rest.NoWarnings{}})
	require.NoError(t, err)
	s.Cluster = &kube.Cluster{Clientset: clientset}

	o := s.Create(t.Context(), "ns", nil)
	require.NoError(t, o.Err)
	require.Equal(t, "paper-x", o.Name)
	require.Equal(t, []v2.Reviewer{mutated, validated}, []v2.Reviewer{o.Mutated, o.Validated})
	require.False(t, o.End.Before(o.Start))

	o = s.create(t.Context(), v2Version, "ns", nil, true)
	require.NoError(t, o.Err)
	require.Equal(t, "paper-xAll", o.Name)

	o = s.Create(t.Context(), "ns", map[string]string{v2.RefusedLabel: ""})
	require.True(t, apierrors.IsForbidden(o.Err), "%v", o.Err)
	require.ErrorContains(t, o.Err, "version stable in pod stable-0 refuses")

	load := s.Load(t.Context(), 500, "ns")
	require.NoError(t, load.Await(t.Context(), o.End, 20))
	var found int
	for _, o := range load.Stop() {
		if o.Err == nil {
			found++
			require.Equal(t, mutated, o.Mutated)
		}
	}
	require.NotZero(t, found)
}

func TestPodsAreAskedByTheNameOfTheService(t *testing.T) {
	s := newSite(t)
	data, err := s.certificate()
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	require.NoError(t, err)
	by := v2.Reviewer{Version: Next, Pod: "next-0"}
	var name string
	pod := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name = r.TLS.ServerName
		var asked admissionv1.AdmissionReview
		if r.Method != http.MethodPost || json.NewDecoder(r.Body).Decode(&asked) != nil || !strings.Contains(string(asked.Request.Object.Raw), `"name":"asked"`) {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		_ = json.NewEncoder(w).Encode(admissionv1.AdmissionReview{TypeMeta: asked.TypeMeta, Response: &admissionv1.AdmissionResponse{
			UID: asked.Request.UID, Allowed: asked.Request.Namespace == "ns", Warnings: []string{by.Warning()},
		}})
	}))
	pod.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	pod.StartTLS()
	t.Cleanup(pod.Close)
	s.dial = func(ctx context.Context, address string) (net.Conn, error) {
		require.Equal(t, "10.0.0.1:9443", address)
		return (&net.Dialer{}).DialContext(ctx, "tcp", pod.Listener.Addr().String())
	}
	at := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "next-0"}, Status: corev1.PodStatus{PodIP: "10.0.0.1"}}
	got, err := s.Ask(t.Context(), at, "ns")
	require.NoError(t, err)
	require.Equal(t, by, got)
	require.Equal(t, "reviewer.reviews-1.svc", name)
	_, err = s.Ask(t.Context(), at, "another")
	require.ErrorContains(t, err, "pod next-0: 200 OK")

	serial, err := s.Presented(t.Context(), at)
	require.NoError(t, err)
	require.Equal(t, s.authority.issued, serial)
}
