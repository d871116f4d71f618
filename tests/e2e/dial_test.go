package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Whatever destination a member's request names, the agent connects to the apiserver alone.
func TestAgentDialsOnlyTheApiserver(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	d := newDecoy(t, p.namespace)
	c := &pickyClient{pod: p.a.Pod, apiserver: apiserver(t), token: in(t, p.a.Pod, "cat", account+"token"), roots: trusts(t, p.a.Pod)}

	// The decoy counts connections: it sees one that reaches it directly.
	in(t, p.a.Pod, "sh", "-c", `nc "$@" </dev/null`, "sh", d.pod.Status.PodIP, "8443")
	require.Equal(t, 1, d.connections(t))

	for _, r := range []struct {
		what, sni, request string
		proxied            bool // else it must be refused
	}{
		{"as usual", "kubernetes.default.svc", "GET /version HTTP/1.1\r\nHost: kubernetes.default.svc\r\n", true},
		{"SNI", d.name, "GET /version HTTP/1.1\r\nHost: kubernetes.default.svc\r\n", true},
		{"Host", "", "GET /version HTTP/1.1\r\nHost: " + d.name + "\r\n", true},
		{"Host with a port", "", "GET /version HTTP/1.1\r\nHost: " + d.address + "\r\n", true},
		{"SNI and Host", d.name, "GET /version HTTP/1.1\r\nHost: " + d.name + ":8443\r\n", true},
		{"forwarding headers", "", "GET /version HTTP/1.1\r\nHost: kubernetes\r\nX-Forwarded-Host: " + d.address + "\r\nForwarded: host=" + d.address + "\r\n", true},
		{"absolute form", "", "GET https://" + d.address + "/version HTTP/1.1\r\nHost: " + d.address + "\r\n", true},
		{"absolute form, plain", d.name, "GET http://" + d.address + "/version HTTP/1.1\r\nHost: kubernetes\r\n", true},
		{"CONNECT", d.name, "CONNECT " + d.address + " HTTP/1.1\r\nHost: " + d.address + "\r\n", false},
		{"a path that is a URL", "", "GET //" + d.address + "/version HTTP/1.1\r\nHost: kubernetes\r\n", false},
		{"an unknown upgrade", "", "GET /version HTTP/1.1\r\nHost: " + d.address + "\r\nConnection: Upgrade\r\nUpgrade: TLS/1.2\r\n", false},
	} {
		t.Run(r.what, func(t *testing.T) {
			resp, body := c.send(t, r.sni, r.request)
			requireFromApiserver(t, r.proxied, resp.StatusCode, body)
		})
	}
	t.Run("authority in HTTP/2", func(t *testing.T) {
		client := http.Client{Timeout: patience, Transport: &http.Transport{ForceAttemptHTTP2: true,
			DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return c.connect(t, d.name, "h2"), nil }}}
		defer client.CloseIdleConnections()
		resp, err := client.Get("https://" + d.address + "/version")
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 2, resp.ProtoMajor)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		requireFromApiserver(t, true, resp.StatusCode, string(body))
	})
	require.Equal(t, 1, d.connections(t), "connections that the decoy got")
}

func requireFromApiserver(t *testing.T, proxied bool, code int, body string) {
	t.Helper()
	if proxied {
		require.Equal(t, http.StatusOK, code, body)
		require.Contains(t, body, "gitVersion")
		return
	}
	require.GreaterOrEqual(t, code, 400, body)
	require.NotContains(t, body, "gitVersion")
}

// decoy is a server that counts connections and sends nothing.
type decoy struct {
	pod           *corev1.Pod
	name, address string
}

func newDecoy(t *testing.T, namespace string) *decoy {
	t.Helper()
	pod := netPod(namespace, "decoy", nodes(t)[0])
	pod.Labels = map[string]string{"app": "decoy"}
	pod.Spec.Containers[0].Command = []string{"sh", "-c", "touch /tmp/connections; exec nc -ll -p 8443 -e sh -c 'echo >>/tmp/connections'"}
	pod.Spec.Containers[0].ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
		Exec: &corev1.ExecAction{Command: []string{"sh", "-c", "netstat -ltn | grep -q :8443"}}}}
	create(t, pod, &corev1.Service{ // a client that resolves its name must reach it
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "decoy"},
		Spec: corev1.ServiceSpec{Selector: pod.Labels, Ports: []corev1.ServicePort{
			{Name: "default", Port: 443, TargetPort: intstr.FromInt32(8443)},
			{Name: "own", Port: 8443, TargetPort: intstr.FromInt32(8443)},
		}},
	})
	pod = ready(t, namespace, "decoy")
	return &decoy{pod, fmt.Sprintf("decoy.%s.svc", namespace), net.JoinHostPort(pod.Status.PodIP, "8443")}
}

func (d *decoy) connections(t *testing.T) int {
	t.Helper()
	return strings.Count(in(t, d.pod, "cat", "/tmp/connections"), "\n")
}

// pickyClient speaks TLS with the apiserver's address from inside a pod, and names any
// destination in its requests.
type pickyClient struct {
	pod              *corev1.Pod
	apiserver, token string
	roots            *x509.CertPool
}

// connect requires that the mesh answers.
func (c *pickyClient) connect(t *testing.T, sni, protocol string) net.Conn {
	t.Helper()
	raw, err := cluster.DialFrom(t.Context(), c.pod, c.apiserver)
	require.NoError(t, err)
	t.Cleanup(func() { _ = raw.Close() })
	require.NoError(t, raw.SetDeadline(time.Now().Add(patience)))
	conn := tls.Client(raw, &tls.Config{
		ServerName: sni, NextProtos: []string{protocol},
		InsecureSkipVerify: true, // below, under another name than that of the SNI
		VerifyConnection: func(s tls.ConnectionState) error {
			_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: c.roots, DNSName: "kubernetes.default.svc", Intermediates: x509.NewCertPool()})
			return err
		},
	})
	require.NoError(t, conn.HandshakeContext(t.Context()))
	return conn
}

// send sends a request as it is, with the pod's token.
func (c *pickyClient) send(t *testing.T, sni, request string) (*http.Response, string) {
	t.Helper()
	conn := c.connect(t, sni, "http/1.1")
	_, err := io.WriteString(conn, request+"Authorization: Bearer "+c.token+"\r\n\r\n")
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp, string(body)
}
