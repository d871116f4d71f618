package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// hosts is one pod behind a Service that serves all hosts other than the apiserver. Its
// answers contain the host, method and path of the request.
type hosts struct {
	ip   string
	cert []byte // in PEM, by which they are trusted
}

// at returns the hosts' address in the form of URLs.
func (h hosts) at() string {
	if strings.Contains(h.ip, ":") {
		return "[" + h.ip + "]"
	}
	return h.ip
}

// otherHosts are the hosts' names.
var otherHosts = []string{"api.example.com", "hooks.example.com", "paths.example.com", "evil.example.com"}

// hostsScript serves HTTP at 80 and 8080, HTTPS at 443 and 8443, and HTTP/2 without TLS at
// 8082. It echoes UDP at 443 and 4443, and WebSockets at 80 and 443. The proxy at 3128
// connects to this pod for every host.
const hostsScript = `const fs = require("fs"), net = require("net"), http = require("http"), http2 = require("http2")
const tls = {key: fs.readFileSync("/hosts/tls.key"), cert: fs.readFileSync("/hosts/tls.crt"), allowHTTP1: true}
const answer = (q, a) => {
	let bytes = 0
	q.on("data", d => bytes += d.length).on("end", () => a.end(JSON.stringify(
		{version: q.httpVersion, host: q.headers.host || q.authority, sni: q.socket.servername || "", method: q.method, path: q.url, bytes})))
}
const socket = (q, s) => {
	const accept = require("crypto").createHash("sha1").update(q.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest("base64")
	s.write("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: " + accept + "\r\n\r\n")
	s.on("data", d => { // a short frame, which is sent back without its mask
		const key = d.subarray(2, 6)
		s.write(Buffer.concat([Buffer.from([d[0], d[1] & 127]), d.subarray(6).map((b, i) => b ^ key[i % 4])]))
	}).on("error", () => {})
}
const proxy = (q, s, head) => {
	const to = net.connect(q.url.split(":").pop(), "127.0.0.1", () => s.write("HTTP/1.1 200 OK\r\n\r\n")).on("error", () => s.destroy())
	to.setNoDelay().write(head)
	s.setNoDelay().on("error", () => to.destroy()).pipe(to).pipe(s)
}
for (const port of [80, 8080]) http.createServer(answer).on("upgrade", socket).listen(port, "::")
for (const port of [443, 8443]) http2.createSecureServer(tls, answer).on("upgrade", socket).listen(port, "::")
http2.createServer(answer).listen(8082, "::")
http.createServer(answer).on("connect", proxy).listen(3128, "::")
for (const port of [443, 4443]) { const s = require("dgram").createSocket("udp6"); s.on("message", (m, from) => s.send(m, from.port, from.address)); s.bind(port) }`

func newHosts(t *testing.T, ns string) hosts {
	t.Helper()
	pod := clientPodOf(ns, "hosts")
	delete(pod.Labels, meshv1alpha1.EnableProxyLabel)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "hosts"}, Data: ownCertificate(t)}
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "hosts", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "hosts"}}})
	c := &pod.Spec.Containers[0]
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "hosts", MountPath: "/hosts"})
	c.Command = []string{"node", "-e", hostsScript}
	c.ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8443)}}}
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "hosts"}, Spec: corev1.ServiceSpec{Selector: map[string]string{podNameLabel: "hosts"}}}
	for _, port := range []int32{80, 443, 3128, 8080, 8082, 8443} {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("tcp-", port), Port: port})
	}
	for _, port := range []int32{443, 4443} {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("udp-", port), Port: port, Protocol: corev1.ProtocolUDP})
	}
	create(t, secret, pod, svc)
	return hosts{svc.Spec.ClusterIP, secret.Data[corev1.TLSCertKey]}
}

// serve waits until a pod reaches the hosts.
func (h hosts) serve(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	until(t, "the hosts", func(context.Context) error {
		code, complaint, _ := curls(t, pod, "https://evil.example.com:8443/")
		return orElse(code == "200", complaint)
	})
}

// ownCertificate returns a self-signed certificate for the names, with its key.
func ownCertificate(t *testing.T) map[string][]byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: t.Name()}, DNSNames: otherHosts,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	return map[string][]byte{
		corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	}
}

// known gives a pod the hosts' names and address.
func (h hosts) known(pod *corev1.Pod) *corev1.Pod {
	pod.Spec.HostAliases = []corev1.HostAlias{{IP: h.ip, Hostnames: otherHosts}}
	return pod
}

// curls requests a URL with curl in a pod. It returns the status, 000 if there was no answer,
// curl's error message, and the body.
func curls(t *testing.T, pod *corev1.Pod, url string, flags ...string) (code, complaint, body string) {
	t.Helper()
	out := shell(t, pod, `curl -sSk -m 120 -o body -w '%{http_code}\n%{errormsg}\n' `+strings.Join(flags, " ")+` `+url+` 2>/dev/null || true; cat body 2>/dev/null || true`)
	lines := append(strings.SplitN(out, "\n", 3), "", "")
	return lines[0], lines[1], lines[2]
}

func passes(t *testing.T, pod *corev1.Pod, what string, flags ...string) string {
	t.Helper()
	code, complaint, body := curls(t, pod, what, flags...)
	require.Equal(t, "200", code, "%s %s: %s%s", what, flags, complaint, body)
	return body
}

// denied requires that a rule refuses plain HTTP with a message, which it returns.
func denied(t *testing.T, pod *corev1.Pod, code int, breaker, what string, flags ...string) string {
	t.Helper()
	got, complaint, body := curls(t, pod, what, flags...)
	require.Equal(t, fmt.Sprint(code), got, "%s %s: %s%s", what, flags, complaint, body)
	var said struct{ Message string }
	require.NoError(t, json.Unmarshal([]byte(body), &said), body)
	require.Contains(t, said.Message, breaker)
	return said.Message
}

// shut requires that a TLS connection that is not decrypted is refused.
func shut(t *testing.T, pod *corev1.Pod, what string, flags ...string) {
	t.Helper()
	code, complaint, body := curls(t, pod, what, flags...)
	require.Equal(t, "000", code, "%s: %s", what, body)
	require.Contains(t, complaint, "access denied", what)
}

// egressTest has the subtests of TestEgress: one pod under one CircuitBreaker for other hosts.
type egressTest struct {
	pod   *corev1.Pod
	ns    string
	h     hosts
	rules string
	of    string
	b     *meshv1alpha1.CircuitBreaker
}

// A pod reaches the other hosts that the rules allow, by the names that its clients send.
func TestEgress(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	h := newHosts(t, ns)
	pod := h.known(clientPodOf(ns, "client"))
	create(t, pod)
	pod = ready(t, ns, "client")
	h.serve(t, pod)
	passes(t, pod, "https://evil.example.com/")
	require.Equal(t, "echo", h.echo(t, pod, "443"))
	require.Zero(t, redirected(t, pod, "passed"), "nothing is redirected without a rule")
	rules := `
trafficInterceptRules:
- name: two-hosts
  interceptType: Whitelist
  contentType: Normal
  contents: [api.example.com, hooks.example.com]
- name: paths
  interceptType: Whitelist
  contentType: Prefix
  contents: [paths.example.com/open/]
  methods: [GET]
- name: limited
  interceptType: Whitelist
  contentType: Regexp
  contents: ['hosts\.` + ns + `\.svc(\.cluster\.local)?']
rateLimitings:
- name: few
  restRules: [{url: "http://api.example.com/few*", method: GET}]
  bucket: {burst: 2, interval: 1h, limit: 1}
  triggerPolicy: LimiterOnly
- name: shut
  restRules: [{url: "https://hooks.example.com"}]
  bucket: {burst: 3, interval: 1h, limit: 1}
  recoverPolicy: {type: Manual}
`
	b := breaker(t, ns, "egress", rules, 1)
	of := ns + "/egress"

	s := &egressTest{pod: pod, ns: ns, h: h, rules: rules, of: of, b: b}
	t.Run("by server name", s.byServerName)
	t.Run("by host", s.byHost)
	t.Run("by path and method", s.byPathAndMethod)
	t.Run("no server name", s.noServerName)
	t.Run("other ports", s.otherPorts)
	t.Run("UDP", s.udp)
	t.Run("Node's fetch and Go", s.nodeAndGo)
	t.Run("limits", s.limits)
	t.Run("faults", s.faults)
	t.Run("unseen: Allow", s.unseenAllowed)
	t.Run("open connections that are now denied are closed", s.openConnections)
	t.Run("removed", s.removed)
}

// redirected returns how many connections and requests of a pod to other hosts had a verdict.
func redirected(t *testing.T, pod *corev1.Pod, verdict string) float64 {
	t.Helper()
	return kube.Total(scrapeAgent(t, pod.Spec.NodeName)["ctrlmesh_egress_requests_total"], map[string]string{"namespace": pod.Namespace, "verdict": verdict})
}

func (s *egressTest) byServerName(t *testing.T) {
	body := passes(t, s.pod, "https://api.example.com/x?q=1")
	require.JSONEq(t, `{"version": "2.0", "host": "api.example.com", "sni": "api.example.com", "method": "GET", "path": "/x?q=1", "bytes": 0}`, body)
	require.Contains(t, passes(t, s.pod, "https://api.example.com/", "--http1.1"), `"1.1"`)
	passes(t, s.pod, "https://api.example.com/", "--tlsv1.2 --tls-max 1.2")
	passes(t, s.pod, "https://hosts."+s.ns+".svc/")
	shut(t, s.pod, "https://evil.example.com/")
	shut(t, s.pod, "https://evil.example.com/", "--tls-max 1.2")
}

func (s *egressTest) byHost(t *testing.T) {
	passes(t, s.pod, "http://api.example.com/")
	passes(t, s.pod, "http://hosts."+s.ns+".svc.cluster.local/")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://evil.example.com/")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://"+s.h.at()+"/")
}

func (s *egressTest) byPathAndMethod(t *testing.T) {
	passes(t, s.pod, "http://paths.example.com/open/x")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://paths.example.com/shut")
	code, _, body := curls(t, s.pod, "http://paths.example.com/open/../shut", "--path-as-is")
	require.Equal(t, "400", code, "servers read it in two ways: %s", body)
	denied(t, s.pod, http.StatusForbidden, s.of, "http://paths.example.com/open/x", "-d data")
	// Each request on one connection is decided by itself.
	out := shell(t, s.pod, `curl -s -w '%{http_code} ' -o a http://paths.example.com/open/1 -o b http://paths.example.com/shut -o c http://paths.example.com/open/2`)
	require.Equal(t, "200 403 200", out)
	shut(t, s.pod, "https://paths.example.com/open/x") // the path is encrypted
}

func (s *egressTest) noServerName(t *testing.T) {
	shut(t, s.pod, "https://"+s.h.at()+"/")
}

func (s *egressTest) otherPorts(t *testing.T) {
	passes(t, s.pod, "http://evil.example.com:8080/")
	passes(t, s.pod, "https://evil.example.com:8443/")
}

func (s *egressTest) udp(t *testing.T) {
	require.Equal(t, "echo", s.h.echo(t, s.pod, "4443"))
	require.Regexp(t, "^E[A-Z]+$", s.h.echo(t, s.pod, "443"), "HTTP/3 clients fail at once")
}

func (s *egressTest) nodeAndGo(t *testing.T) {
	const fetching = `NODE_TLS_REJECT_UNAUTHORIZED=0 node -e 'for (const u of process.argv.slice(1)) fetch(u).then(r => console.log(u, r.status), e => console.log(u, e.cause.code || e.cause.message))' `
	require.Regexp(t, "^https://api.example.com/ 200$", in(t, s.pod, "sh", "-c", fetching+"https://api.example.com/ 2>/dev/null | tr -d '\n'"))
	require.NotContains(t, in(t, s.pod, "sh", "-c", fetching+"https://evil.example.com/ 2>/dev/null"), "200")
	require.Contains(t, in(t, s.pod, "sh", "-c", fetching+"http://evil.example.com/ 2>/dev/null"), "403")

	goes := goClient(t, s.pod, s.h, nil)
	resp, err := goes.Get("https://api.example.com/")
	require.NoError(t, err)
	_ = resp.Body.Close()
	_, err = goes.Get("https://evil.example.com/")
	require.ErrorContains(t, err, "access denied")
}

func (s *egressTest) limits(t *testing.T) {
	for range 2 {
		passes(t, s.pod, "http://api.example.com/few/1")
	}
	message := denied(t, s.pod, http.StatusTooManyRequests, s.of, "http://api.example.com/few/2")
	require.Contains(t, message, "few")
	passes(t, s.pod, "http://api.example.com/more")
	for range 3 {
		passes(t, s.pod, "https://hooks.example.com/")
	}
	for range 2 { // the bucket is empty, the breaker open
		shut(t, s.pod, "https://hooks.example.com/")
	}
	snapshot(t, s.b, s.pod.Name, "shut", func(s meshv1alpha1.LimitingSnapshot) bool {
		return s.State == meshv1alpha1.BreakerOpened && s.Passed == 3 && s.Refused >= 1
	})
	snapshot(t, s.b, s.pod.Name, "few", func(s meshv1alpha1.LimitingSnapshot) bool { return s.Passed == 2 && s.Refused == 1 })
	for _, verdict := range []string{"passed", "denied", "unseen", "limited", "opened"} {
		counted(t, s.pod.Spec.NodeName, "ctrlmesh_egress_requests_total", map[string]string{"namespace": s.ns, "verdict": verdict}, 1)
	}
}

func (s *egressTest) faults(t *testing.T) {
	f := faults(t, s.ns, "others", `
httpFault:
- name: teapot
  match: {httpMatch: [{host: {exact: api.example.com}, path: {prefix: /brew}, method: GET}]}
  abort: {httpStatus: 418, percent: "100"}
`, 1)
	code, _, body := curls(t, s.pod, "http://api.example.com/brew/coffee")
	require.Equal(t, "418", code)
	require.Contains(t, body, "others/teapot")
	passes(t, s.pod, "http://api.example.com/drink")
	injected(t, f, s.pod.Name, "teapot", 1)
	remove(t, f)
}

func (s *egressTest) unseenAllowed(t *testing.T) {
	s.b = breaker(t, s.ns, "egress", s.rules+"egress: {unseen: Allow}\n", 1)
	passes(t, s.pod, "https://"+s.h.at()+"/")
	passes(t, s.pod, "https://paths.example.com/open/x")
	shut(t, s.pod, "https://evil.example.com/")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://evil.example.com/")
}

func (s *egressTest) openConnections(t *testing.T) {
	conn, err := cluster.DialFrom(t.Context(), s.pod, net.JoinHostPort(s.h.ip, "443"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	c := tls.Client(conn, &tls.Config{ServerName: "api.example.com", InsecureSkipVerify: true}) // the server's identity does not matter
	require.NoError(t, c.HandshakeContext(t.Context()))
	breaker(t, s.ns, "egress", strings.Replace(s.rules, "api.example.com, hooks", "hooks", 1), 1)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err)
	var timeout net.Error
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "it is open: %v", err)
	shut(t, s.pod, "https://api.example.com/")
}

func (s *egressTest) removed(t *testing.T) {
	remove(t, s.b)
	until(t, "the host to be reachable", func(context.Context) error {
		code, complaint, _ := curls(t, s.pod, "https://evil.example.com/")
		return orElse(code == "200", complaint)
	})
	passes(t, s.pod, "http://evil.example.com/")
	until(t, "datagrams to pass", func(context.Context) error { // the rules end before the redirection does
		said := s.h.echo(t, s.pod, "443")
		return orElse(said == "echo", said)
	})
}

// echo sends a datagram to a port and returns the answer, or the code of the error.
func (h hosts) echo(t *testing.T, pod *corev1.Pod, port string) string {
	t.Helper()
	return strings.TrimSpace(in(t, pod, "node", "-e", `const [ip, port] = process.argv.slice(1)
const end = text => { console.log(text); process.exit() }
const s = require("dgram").createSocket(ip.includes(":") ? "udp6" : "udp4").on("error", e => end(e.code)).on("message", m => end(String(m)))
s.connect(Number(port), ip, e => e ? end(e.code) : s.send("echo"))
setTimeout(end, 60000, "nothing")`, h.ip, port))
}

// goClient returns Go's HTTP client, which connects to the hosts from inside a pod.
func goClient(t *testing.T, pod *corev1.Pod, h hosts, roots *x509.CertPool) *http.Client {
	t.Helper()
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots, InsecureSkipVerify: roots == nil}, // the server's identity does not matter then
		ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			_, port, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			return cluster.DialFrom(ctx, pod, net.JoinHostPort(h.ip, port))
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// The pod reaches two hosts, and no other.
func TestExampleEgress(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "operator-demo")
	probeRights(t, ns)
	h := newHosts(t, ns)
	pod := h.known(clientPodOf(ns, "client"))
	pod.Labels["app"] = "operator-demo"
	create(t, pod)
	pod = ready(t, ns, "client")
	h.serve(t, pod)
	example[meshv1alpha1.CircuitBreaker](t, "breaker-egress.yaml", ns, "egress", 1)
	for _, host := range []string{"api.example.com", "hooks.example.com"} {
		passes(t, pod, "https://"+host+"/")
		passes(t, pod, "http://"+host+"/any", "-X DELETE")
	}
	shut(t, pod, "https://evil.example.com/")
	shut(t, pod, "https://"+h.at()+"/")
	denied(t, pod, http.StatusForbidden, ns+"/egress", "http://evil.example.com/")
	require.Equal(t, http.StatusOK, hastyClient(t, pod).get(t, "/version").code, "rules for other hosts do not apply to the apiserver")
}

// TestTrafficDecrypted: in a pod that opted in, rules see paths and methods within HTTPS, and
// its clients trust the certificates. Agents read their roots when they start.
func TestTrafficDecrypted(t *testing.T) {
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	h := newHosts(t, ns)
	trustHosts(t, h)
	pod := h.known(clientPodOf(ns, "client"))
	pod.Annotations = map[string]string{meshv1alpha1.TrustEgressAnnotation: "true"}
	without := h.known(clientPodOf(ns, "without"))
	create(t, pod, without)
	pod, without = ready(t, ns, "client"), ready(t, ns, "without")
	h.serve(t, pod)
	b := breaker(t, ns, "paths", `
trafficInterceptRules:
- name: paths
  interceptType: Whitelist
  contentType: Prefix
  contents: [paths.example.com/open/]
  methods: [GET]
- name: all
  interceptType: Whitelist
  contentType: Normal
  contents: [api.example.com]
- name: open
  interceptType: Whitelist
  contentType: Regexp
  contents: ['hooks\.example\.com/(in|socket)', 'kubernetes\.default\.svc/x']
rateLimitings:
- name: few
  restRules: [{url: "https://paths.example.com/open/few*"}]
  bucket: {burst: 1, interval: 1h, limit: 1}
  triggerPolicy: LimiterOnly
`, 2)
	d := &decryptedTest{ns: ns, h: h, pod: pod, without: without, b: b}
	d.curl(t)
	d.node(t)
	d.golang(t)
	d.refused(t)
	d.streams(t)
	d.faults(t)
	d.notOptedIn(t)
}

// trustHosts lets agents trust the hosts' certificate until the test ends, and restarts them.
func trustHosts(t *testing.T, h hosts) {
	t.Helper()
	roots := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: kube.SystemNamespace, Name: "ctrlmesh-egress-roots"},
		Data:       map[string]string{"hosts.pem": string(h.cert)},
	}
	write(t, roots)
	t.Cleanup(func() {
		if err := cluster.Delete(context.Background(), roots); err != nil {
			t.Errorf("deleting ConfigMap %s: %v", roots.Name, err)
		}
	})
	restartAgents(t)
}

// decryptedTest is a pod that opted in to decryption, and one that did not.
type decryptedTest struct {
	ns           string
	h            hosts
	pod, without *corev1.Pod
	b            *meshv1alpha1.CircuitBreaker
}

// shell runs a script in the pod, without the flags of [shell].
func (d *decryptedTest) shell(t *testing.T, script string) string {
	t.Helper()
	return strings.TrimSpace(in(t, d.pod, "sh", "-c", script))
}

// curlStatus has curl print the status of each of two answers.
const curlStatus = `-sS -m 120 -o /dev/null -o /dev/null -w '%{http_code} ' `

func (d *decryptedTest) curl(t *testing.T) {
	for _, version := range []string{"--http1.1", "--http2"} {
		out := d.shell(t, "curl "+version+" "+curlStatus+"https://paths.example.com/open/1 https://paths.example.com/shut; curl "+version+" -d data "+curlStatus+"https://paths.example.com/open/1")
		require.Equal(t, "200 403 403", out, "curl, which verifies the certificate")
	}
	message := denied(t, d.pod, http.StatusForbidden, d.ns+"/paths", "https://paths.example.com/shut")
	require.NotEmpty(t, message)
	require.Equal(t, "200 429", d.shell(t, "curl "+curlStatus+"https://paths.example.com/open/few https://paths.example.com/open/few"))
}

func (d *decryptedTest) node(t *testing.T) {
	const fetching = `node -e 'Promise.all(process.argv.slice(1).map(u => fetch(u).then(r => r.status, e => e.cause.code || e.cause.message))).then(all => console.log(all.join(" ")))' `
	require.Equal(t, "200 403", d.shell(t, fetching+"https://paths.example.com/open/1 https://paths.example.com/shut"), "Node's fetch")
}

// golang trusts the certificates of the directories that SSL_CERT_DIR names in the pod.
func (d *decryptedTest) golang(t *testing.T) {
	trusted := x509.NewCertPool()
	require.True(t, trusted.AppendCertsFromPEM([]byte(d.shell(t, "cat ${SSL_CERT_DIR%%:*}/*"))))
	goes := goClient(t, d.pod, d.h, trusted)
	for path, code := range map[string]int{"open/1": http.StatusOK, "shut": http.StatusForbidden} {
		resp, err := goes.Get("https://paths.example.com/" + path)
		require.NoError(t, err)
		_ = resp.Body.Close()
		require.Equal(t, code, resp.StatusCode, path)
	}
	own := x509.NewCertPool()
	require.True(t, own.AppendCertsFromPEM(d.h.cert))
	resp, err := goClient(t, d.pod, d.h, own).Get("https://api.example.com/")
	require.NoError(t, err, "not decrypted unless a rule needs it")
	_ = resp.Body.Close()
}

func (d *decryptedTest) refused(t *testing.T) {
	shut(t, d.pod, "https://evil.example.com/")
	shut(t, d.pod, "https://kubernetes.default.svc/x", "--connect-to", "kubernetes.default.svc:443:api.example.com:443") // the mesh signs no certificate for this name
}

func (d *decryptedTest) streams(t *testing.T) {
	out := d.shell(t, "dd if=/dev/zero of=/tmp/zeros bs=1M count=32 2>/dev/null; curl -sS -m 120 -T /tmp/zeros https://hooks.example.com/in; curl -sS -m 120 --http1.1 -T - https://hooks.example.com/in </tmp/zeros")
	require.Equal(t, 2, strings.Count(out, fmt.Sprintf(`"bytes":%d`, 32<<20)), "long uploads: %s", out)
	require.Equal(t, "hello error", d.shell(t, speakingWebSocket+"wss://hooks.example.com/socket; echo -n ' '; "+speakingWebSocket+"wss://hooks.example.com/"))
}

func (d *decryptedTest) faults(t *testing.T) {
	f := faults(t, d.ns, "others", `
httpFault:
- name: teapot
  match: {httpMatch: [{host: {exact: paths.example.com}, path: {prefix: /open/brew}, method: GET}]}
  abort: {httpStatus: 418, percent: "100"}
- name: host
  match: {httpMatch: [{host: {exact: api.example.com}}]}
  abort: {httpStatus: 418, percent: "100"}
`, 2)
	require.Equal(t, "418 200", d.shell(t, "curl "+curlStatus+"https://paths.example.com/open/brew https://paths.example.com/open/drink"))
	require.Equal(t, "418", d.shell(t, "curl "+curlStatus+"https://api.example.com/"), "a fault with an answer needs decryption")
	shut(t, d.without, "https://api.example.com/")
	remove(t, f)
}

func (d *decryptedTest) notOptedIn(t *testing.T) {
	shut(t, d.without, "https://paths.example.com/open/1")
	until(t, "the status to say what to do", func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(d.b), d.b); err != nil {
			return err
		}
		for _, p := range d.b.Status.TargetStatus {
			if p.PodName == "without" && strings.Contains(p.Message, meshv1alpha1.TrustEgressAnnotation) {
				return nil
			}
		}
		return fmt.Errorf("it does not: %+v", d.b.Status.TargetStatus)
	})
}
