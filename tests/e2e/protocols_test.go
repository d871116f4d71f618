package e2e

import (
	"bufio"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/cryptobyte"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// blacklist is the specification of the rules, up to the brace that ends it.
const blacklist = `
selector: {matchExpressions: [{key: ` + podNameLabel + `, operator: In, values: [client, iptables]}]}
trafficInterceptRules:
- name: not-evil
  interceptType: Blacklist
  contentType: Normal
  contents: [evil.example.com]
- name: no-deletes
  interceptType: Blacklist
  contentType: Regexp
  contents: ['(api|hooks)\.example\.com/admin/[0-9]+']
  methods: [DELETE]
egress: {ports: [80, 443, 3128, 8082]`

// protocolTest has the subtests of TestEgressProtocols: two pods under one Blacklist.
type protocolTest struct {
	pod      *corev1.Pod
	iptables *corev1.Pod
	ns       string
	h        hosts
	of       string
	b        *meshv1alpha1.CircuitBreaker
	f        *meshv1alpha1.FaultInjection // set before the subtest faults
}

// Rules apply to every protocol that pods speak with other hosts, and what passes works as
// without the mesh. What a Blacklist does not name passes.
func TestEgressProtocols(t *testing.T) {
	t.Parallel()
	ns := namespace(t, "traffic")
	probeRights(t, ns)
	h := newHosts(t, ns)
	pod, iptables, address := h.known(clientPodOf(ns, "client")), h.known(clientPodOf(ns, "iptables")), clientPodOf(ns, "address")
	capturedBy(meshv1alpha1.CaptureIPTables)(iptables)
	capturedBy(meshv1alpha1.CaptureAddress)(address)
	create(t, pod, iptables, address)
	pod, iptables = ready(t, ns, pod.Name), ready(t, ns, iptables.Name)
	ready(t, ns, address.Name)
	h.serve(t, pod)
	b := breaker(t, ns, "blacklist", blacklist+"}", 2)
	of := ns + "/blacklist"

	s := &protocolTest{pod: pod, iptables: iptables, ns: ns, h: h, of: of, b: b}
	t.Run("Blacklist", s.blacklist)
	s.f = faults(t, ns, "others", faultsOfOthers, 1)
	t.Run("faults", s.faults)
	t.Run("HTTP/2 without TLS", s.cleartextHTTP2)
	t.Run("a proxy", s.proxy)
	t.Run("long uploads", s.longUploads)
	t.Run("injected faults are reported", s.injected)
	t.Run("WebSockets", s.webSockets)
	t.Run("an encrypted ClientHello", s.encryptedClientHello)
	t.Run("captured by address", s.capturedByAddress)
	t.Run("disabled", s.disabled)
}

func (s *protocolTest) blacklist(t *testing.T) {
	for _, pod := range []*corev1.Pod{s.pod, s.iptables} {
		passes(t, pod, "http://api.example.com/")
		passes(t, pod, "https://api.example.com/")
		passes(t, pod, "https://"+s.h.at()+"/") // no server name: nothing matches the Blacklist
		require.Contains(t, denied(t, pod, http.StatusForbidden, s.of, "http://evil.example.com/"), "not-evil")
		shut(t, pod, "https://evil.example.com/")
		denied(t, pod, http.StatusForbidden, s.of, "http://evil.example.com:8082/")
		passes(t, pod, "https://evil.example.com:8443/") // not a port of egress.ports
		require.Regexp(t, "^E[A-Z]+$", s.h.echo(t, pod, "443"))
	}
	require.Contains(t, denied(t, s.pod, http.StatusForbidden, s.of, "http://api.example.com/admin/1", "-X DELETE"), "no-deletes")
	passes(t, s.pod, "http://api.example.com/admin/1")
	passes(t, s.pod, "http://api.example.com/admin/me", "-X DELETE")
	passes(t, s.pod, "http://paths.example.com/admin/1", "-X DELETE")
}

func (s *protocolTest) faults(t *testing.T) { testFaultsOfOthers(t, s.pod) }

func (s *protocolTest) cleartextHTTP2(t *testing.T) {
	require.Contains(t, passes(t, s.pod, "http://api.example.com:8082/", "--http2-prior-knowledge"), `"2.0"`)
	denied(t, s.pod, http.StatusForbidden, s.of, "http://evil.example.com:8082/", "--http2-prior-knowledge")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://api.example.com:8082/admin/1", "--http2-prior-knowledge", "-X DELETE")
}

func (s *protocolTest) proxy(t *testing.T) {
	proxy := "-x http://" + net.JoinHostPort(s.h.ip, "3128")
	passes(t, s.pod, "https://api.example.com/", proxy)
	passes(t, s.pod, "http://api.example.com/", proxy)
	passes(t, s.pod, "http://api.example.com/", proxy, "--proxytunnel")
	code, complaint, _ := curls(t, s.pod, "https://evil.example.com/", proxy)
	require.Equal(t, "000", code)
	require.Contains(t, complaint, "403", "the proxy is not asked to connect")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://evil.example.com/", proxy)
	// Clients that name one host to the proxy and another inside the tunnel.
	shut(t, s.pod, "https://evil.example.com/", proxy, "--connect-to evil.example.com:443:api.example.com:443")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://evil.example.com/", proxy, "--proxytunnel", "--connect-to evil.example.com:80:api.example.com:80")
	denied(t, s.pod, http.StatusForbidden, s.of, "http://api.example.com/admin/1", proxy, "--proxytunnel", "-X DELETE")
}

func (s *protocolTest) longUploads(t *testing.T) {
	for _, how := range []string{
		"--http1.1 -T - http://api.example.com/", "-T zeros http://api.example.com/",
		"--http1.1 -T - https://api.example.com/", "--http2 -T zeros https://api.example.com/",
		"--http2-prior-knowledge -T - http://api.example.com:8082/",
		"-x http://" + net.JoinHostPort(s.h.ip, "3128") + " -T zeros https://api.example.com/",
	} {
		out := shell(t, s.pod, "dd if=/dev/zero of=zeros bs=1M count=32 2>/dev/null; curl -sSk -m 180 "+how+" <zeros")
		require.Contains(t, out, fmt.Sprintf(`"bytes":%d`, 32<<20), how)
	}
}

func (s *protocolTest) injected(t *testing.T) {
	for rule, n := range map[string]int64{"delay": 1, "slow": 1, "header": 1, "reset": 1, "truncate": 2, "tls": 1} {
		injected(t, s.f, s.pod.Name, rule, n)
		until(t, "the access line", func(context.Context) error { return faultLine(s.ns, s.pod.Name, "others/"+rule) })
	}
	remove(t, s.f)
}

func (s *protocolTest) webSockets(t *testing.T) {
	require.Equal(t, "hello", shell(t, s.pod, "export NODE_TLS_REJECT_UNAUTHORIZED=0; "+speakingWebSocket+"ws://api.example.com/"))
	require.Equal(t, "hello", shell(t, s.pod, "export NODE_TLS_REJECT_UNAUTHORIZED=0; "+speakingWebSocket+"wss://api.example.com/"))
	require.Equal(t, "error", shell(t, s.pod, "export NODE_TLS_REJECT_UNAUTHORIZED=0; "+speakingWebSocket+"ws://evil.example.com/"))
	require.Equal(t, "error", shell(t, s.pod, "export NODE_TLS_REJECT_UNAUTHORIZED=0; "+speakingWebSocket+"wss://evil.example.com/"))

	kept, cut := s.h.socket(t, s.pod, "paths.example.com"), s.h.socket(t, s.pod, "hooks.example.com")
	require.NoError(t, kept.echoes())
	require.NoError(t, cut.echoes())
	breaker(t, s.ns, "blacklist", strings.Replace(blacklist, "[evil", "[hooks.example.com, evil", 1)+"}", 2)
	require.NoError(t, kept.SetDeadline(time.Now().Add(patience)))
	_ = cut.SetDeadline(time.Now().Add(patience)) // it may be cut already
	var timeout net.Error
	_, err := cut.Read(make([]byte, 1))
	require.Error(t, err)
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "it is open: %v", err)
	require.NoError(t, kept.echoes())
}

func (s *protocolTest) encryptedClientHello(t *testing.T) {
	hello := func(inner, outer string) error {
		conn, err := cluster.DialFrom(t.Context(), s.pod, net.JoinHostPort(s.h.ip, "443"))
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		return tls.Client(conn, &tls.Config{
			ServerName: inner, EncryptedClientHelloConfigList: echConfigs(t, outer), MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, // the server's identity does not matter
			EncryptedClientHelloRejectionVerify: func(tls.ConnectionState) error { return nil },
		}).HandshakeContext(t.Context())
	}
	var reached *tls.ECHRejectionError // the hosts do not support it
	require.ErrorAs(t, hello("evil.example.com", "paths.example.com"), &reached)
	breaker(t, s.ns, "blacklist", blacklist+", unseen: Deny}", 2)
	require.ErrorContains(t, hello("paths.example.com", "paths.example.com"), "access denied", "the outer name does not count")
	passes(t, s.pod, "https://paths.example.com/")
	shut(t, s.pod, "https://"+s.h.at()+"/")
}

func (s *protocolTest) capturedByAddress(t *testing.T) {
	b := breaker(t, s.ns, "not-there", "selector: {matchLabels: {"+podNameLabel+": address}}\n"+blacklist[strings.Index(blacklist, "trafficInterceptRules"):]+"}", 0)
	until(t, "the status to say what to do", func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(b), b)
		if err == nil && (len(b.Status.TargetStatus) != 1 || !strings.Contains(b.Status.TargetStatus[0].Message, "captured by address")) {
			err = fmt.Errorf("it does not: %+v", b.Status.TargetStatus)
		}
		return err
	})
}

func (s *protocolTest) disabled(t *testing.T) {
	s.b.Spec.Disabled = true
	write(t, s.b)
	notInForce(t, s.b, "Disabled")
	for _, pod := range []*corev1.Pod{s.pod, s.iptables} {
		passes(t, pod, "https://evil.example.com/")
		require.Equal(t, "echo", s.h.echo(t, pod, "443"))
	}
}

const faultsOfOthers = `
selector: {matchLabels: {` + podNameLabel + `: client}}
httpFault:
- name: delay
  match: {httpMatch: [{host: {exact: api.example.com}, path: {exact: /delay}}]}
  delay: {fixedDelay: 1s, percent: "100"}
- name: header
  match: {httpMatch: [{host: {regex: "(api|hooks)[.].*"}, method: POST, headers: [{name: X-Inject, value: "yes"}]}]}
  abort: {httpStatus: 503, percent: "100"}
  count: 1
- name: reset
  match: {httpMatch: [{path: {regex: "/reset/[0-9]+"}}]}
  reset: {percent: "100"}
- name: truncate
  match: {httpMatch: [{path: {prefix: /truncate}}]}
  truncate: {percent: "100", afterBytes: 20}
- name: slow
  match: {httpMatch: [{path: {prefix: /slow}}]}
  slowBody: {percent: "100", bytesPerSecond: 1300}
- name: tls
  match: {httpMatch: [{host: {exact: hooks.example.com}}]}
  reset: {percent: "100", afterAnswer: true}
`

// Faults are injected into requests to other hosts, too, and into TLS where no decryption is
// needed.
func testFaultsOfOthers(t *testing.T, pod *corev1.Pod) {
	took := func(url string, flags ...string) time.Duration {
		start := time.Now()
		passes(t, pod, url, flags...)
		return time.Since(start)
	}
	require.GreaterOrEqual(t, took("http://api.example.com/delay"), time.Second)
	require.GreaterOrEqual(t, took("http://api.example.com/slow/"+strings.Repeat("a", 2000)), 1200*time.Millisecond)
	code, complaint, _ := curls(t, pod, "http://api.example.com/slow/"+strings.Repeat("a", 3000))
	require.Equal(t, "414", code, "an expression on paths matches no longer path: %s", complaint)

	code, complaint, body := curls(t, pod, "http://api.example.com/x", "-H 'X-Inject: yes' -d data")
	require.Equal(t, "503", code, complaint)
	require.Contains(t, body, "FaultInjection "+pod.Namespace+"/others/header")
	passes(t, pod, "http://api.example.com/x", "-H 'X-Inject: yes' -d data") // the count is 1
	code, complaint, _ = curls(t, pod, "http://api.example.com/reset/1")
	require.Equal(t, "000", code, complaint)
	passes(t, pod, "http://api.example.com/reset/none")
	_, complaint, body = curls(t, pod, "http://api.example.com/truncate")
	require.NotEmpty(t, complaint)
	require.Len(t, body, 20)
	_, complaint, body = curls(t, pod, "http://api.example.com:8082/truncate", "--http2-prior-knowledge")
	require.NotEmpty(t, complaint)
	require.LessOrEqual(t, len(body), 20) // curl may discard the bytes of a broken stream
	code, complaint, _ = curls(t, pod, "https://hooks.example.com/")
	require.Equal(t, "000", code, complaint)
	passes(t, pod, "https://api.example.com/truncate") // the path is encrypted

	out := shell(t, ready(t, pod.Namespace, "hosts"), "curl -s -o body -w '%{http_code}' http://127.0.0.1/reset/1")
	require.Equal(t, "200", out, "no faults in pods without the label")
}

// speakingWebSocket is Node's client, which prints the echo, or "error".
const speakingWebSocket = `node --experimental-websocket -e 'const s = new WebSocket(process.argv[1]), end = text => { process.stdout.write(text); process.exit() }
s.onopen = () => s.send("hello"); s.onmessage = m => end(m.data); s.onerror = () => end("error")' 2>/dev/null `

// socket is a WebSocket that is open.
type socket struct {
	net.Conn
	r *bufio.Reader
}

func (h hosts) socket(t *testing.T, pod *corev1.Pod, host string) socket {
	t.Helper()
	conn, err := cluster.DialFrom(t.Context(), pod, net.JoinHostPort(h.ip, "80"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", host)
	require.NoError(t, err)
	s := socket{conn, bufio.NewReader(conn)}
	resp, err := http.ReadResponse(s.r, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
	return s
}

// echoes returns an error unless a message is echoed.
func (s socket) echoes() error {
	const text = "hello"
	if _, err := io.WriteString(s, "\x81\x85\x00\x00\x00\x00"+text); err != nil { // the mask changes nothing
		return err
	}
	back := make([]byte, len("\x81\x05"+text))
	if _, err := io.ReadFull(s.r, back); err != nil {
		return err
	}
	return orElse(string(back) == "\x81\x05"+text, "another text came back")
}

// echConfigs returns the ECH configurations of a server with the given public name.
func echConfigs(t *testing.T, public string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	require.NoError(t, err)
	var list cryptobyte.Builder
	list.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		b.AddUint16(0xfe0d) // the version
		b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
			b.AddUint8(1)
			b.AddUint16(0x20) // X25519
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(key.PublicKey().Bytes()) })
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint16(1); b.AddUint16(1) }) // HKDF-SHA256, AES-128-GCM
			b.AddUint8(32)                                                                            // of names
			b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(public)) })
			b.AddUint16(0)
		})
	})
	return list.BytesOrPanic()
}
