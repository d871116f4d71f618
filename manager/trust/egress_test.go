package trust

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func egress(t *testing.T, at time.Time, ips ...string) *Authority {
	t.Helper()
	a := &Authority{Client: &oneSecret{}, Namespace: "mesh", Egress: true, Names: func() Names { return apiNames(ips...) }, Now: func() time.Time { return at }}
	require.NoError(t, a.Load(t.Context()))
	return a
}

func TestEgressLeaf(t *testing.T) {
	a := egress(t, now, "10.96.0.1", "fd00::1")
	csr := request(t, p256(t))
	for host, name := range map[string]string{
		"example.com": "example.com", "Example.COM.": "example.com", "a_b.example.com": "a_b.example.com",
		"10.96.0.2": "10.96.0.2", "fd00::2": "fd00::2", "::ffff:10.1.2.3": "10.1.2.3", "registry": "registry",
		"mykubernetes": "mykubernetes", "other.default.svc": "other.default.svc",
	} {
		chain, err := a.SignFor(csr, host)
		require.NoError(t, err, host)
		require.NoError(t, verify(chain, a.Bundle(), name, now), host)
		require.Error(t, verify(chain, a.Bundle(), "kubernetes.default.svc", now))
		require.Error(t, verify(chain, a.Bundle(), "evil.example.com", now), "what the request asks for is ignored")
		leaf, err := x509.ParseCertificate(chain[0])
		require.NoError(t, err)
		require.Equal(t, 1, len(leaf.DNSNames)+len(leaf.IPAddresses))
		require.Equal(t, leafLife, leaf.NotAfter.Sub(now))
	}
}

func TestEgressRefuses(t *testing.T) {
	a := egress(t, now, "10.96.0.1", "fd00::1")
	csr := request(t, p256(t))
	for _, host := range []string{
		"kubernetes", "kubernetes.default", "KUBERNETES.default.svc", "kubernetes.default.svc.cluster.local", "kubernetes.default.svc.cluster.local.", "x.kubernetes.default.svc",
		"10.96.0.1", "::ffff:10.96.0.1", "fd00::1", "FD00:0::1",
	} {
		_, err := a.SignFor(csr, host)
		require.ErrorContains(t, err, "the host stands for the apiserver", host)
	}
	for _, host := range []string{
		"", ".", "*", "*.example.com", "exa mple.com", "example..com", "example.com..", "-a.com", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1",
		"10.96.1", "010.96.0.1", "0x0a.96.0.1", "example.com:443", "http://example.com", "a/b", "ex\x00ample.com", "exämple.com", strings.Repeat("a.", 127) + "com",
	} {
		_, err := a.SignFor(csr, host)
		require.Error(t, err, "%q", host)
	}
	_, err := a.SignFor([]byte("x"), "example.com")
	require.Error(t, err)

	mesh := &Authority{Client: &oneSecret{}, Namespace: "mesh", Names: func() Names { return apiNames("10.96.0.1") }, Now: a.Now}
	require.NoError(t, mesh.Load(t.Context()))
	_, err = mesh.SignFor(csr, "example.com")
	require.Error(t, err, "the mesh CA signs for nobody else")
}

// An address that the apiserver is given is refused at once, and one that it had is
// still: clients may have it for the apiserver's yet.
func TestEgressRotatesWithTheApiserver(t *testing.T) {
	at, ips := now, []string{"10.96.0.1"}
	c := &oneSecret{}
	a := &Authority{Client: c, Namespace: "mesh", Egress: true, Names: func() Names { return apiNames(ips...) }, Now: func() time.Time { return at }}
	require.NoError(t, a.Load(t.Context()))
	require.Equal(t, EgressCASecret, c.stored.Name)
	csr := request(t, p256(t))
	first := a.Bundle()
	old, err := a.SignFor(csr, "192.0.2.7")
	require.NoError(t, err)

	ips = []string{"10.96.0.1", "192.0.2.7"}
	_, err = a.SignFor(csr, "192.0.2.7")
	require.Error(t, err)
	chain, err := a.SignFor(csr, "example.com")
	require.NoError(t, err)
	for range 30 {
		require.NoError(t, a.Maintain(t.Context(), a.Bundle(), map[string]time.Time{}))
		require.NoError(t, verify(chain, a.Bundle(), "example.com", at), "a leaf is good while it lives")
		at = at.Add(time.Minute)
	}
	require.NotEqual(t, first, a.Bundle())
	ips = []string{"10.96.0.1"}
	_, err = a.SignFor(csr, "192.0.2.7")
	require.Error(t, err)
	chain, err = a.SignFor(csr, "example.com")
	require.NoError(t, err)
	require.NoError(t, verify(chain, a.Bundle(), "example.com", at))
	require.NoError(t, verify(old, a.Bundle(), "192.0.2.7", at))
	at = at.Add(leafLife + time.Hour)
	require.NoError(t, a.Maintain(t.Context(), a.Bundle(), map[string]time.Time{}))
	require.Equal(t, 1, bytes.Count(a.Bundle(), []byte("BEGIN")))
}

// The holder of the egress CA's key can still not speak for the apiserver.
func TestOpenSSLHoldsTheEgressConstraints(t *testing.T) {
	ca, err := NewCA("egress", apiNames("10.96.0.1", "fd00::1").exclude, time.Now())
	require.NoError(t, err)
	for what, c := range map[string]struct {
		leaf *x509.Certificate
		ok   bool
	}{
		"apiserver":      {&x509.Certificate{DNSNames: []string{"kubernetes.default.svc"}}, false},
		"apiserver ipv4": {&x509.Certificate{IPAddresses: []net.IP{net.ParseIP("10.96.0.1").To4()}}, false},
		"apiserver ipv6": {&x509.Certificate{IPAddresses: []net.IP{net.ParseIP("fd00::1")}}, false},
		"another":        {&x509.Certificate{DNSNames: []string{"example.com"}}, true},
		"another ipv4":   {&x509.Certificate{IPAddresses: []net.IP{net.ParseIP("10.96.0.2").To4()}}, true},
	} {
		c.leaf.NotBefore, c.leaf.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, c.leaf, ca.certs[0], p256(t).Public(), ca.key)
		require.NoError(t, err)
		out, err := openssl(t, "verify", "-CAfile", file(t, ca.Bundle()), file(t, encodePEM("CERTIFICATE", der)))
		require.Equal(t, c.ok, err == nil, "%s: %s", what, out)
		if !c.ok {
			require.Contains(t, out, "excluded subtree violation", what)
		}
	}
}

// directory is a bundle as pods have it, of a CA that is being rotated.
func directory(t *testing.T, a *Authority) string {
	t.Helper()
	files, err := Directory(a.Bundle())
	require.NoError(t, err)
	dir := t.TempDir()
	for name, content := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return dir
}

func TestDirectory(t *testing.T) {
	at := time.Now().Add(-time.Hour)
	a := egress(t, at, "10.96.0.1")
	a.Names = func() Names { return apiNames("10.96.0.1", "10.96.0.9") }
	a.Now = func() time.Time { return at.Add(time.Minute) }
	require.NoError(t, a.Maintain(t.Context(), nil, nil))
	dir := directory(t, a)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2)
	for _, e := range entries {
		out, err := openssl(t, "x509", "-noout", "-hash", "-in", filepath.Join(dir, e.Name()))
		require.NoError(t, err, out)
		require.Equal(t, e.Name(), strings.TrimSpace(out)+".0")
	}
	ca, err := NewCA("one  Subject ", Names{}.exclude, at)
	require.NoError(t, err)
	same, err := NewCA("one  Subject ", Names{}.exclude, at)
	require.NoError(t, err)
	files, err := Directory(append(ca.Bundle(), same.Bundle()...))
	require.NoError(t, err)
	names := slices.Sorted(maps.Keys(files))
	require.Len(t, names, 2)
	require.Equal(t, strings.TrimSuffix(names[0], ".0"), strings.TrimSuffix(names[1], ".1"))
	out, err := openssl(t, "x509", "-noout", "-hash", "-in", file(t, ca.Bundle()))
	require.NoError(t, err, out)
	require.Equal(t, names[0], strings.TrimSpace(out)+".0")
	_, err = Directory([]byte("rubbish"))
	require.Error(t, err)
}

// What pods are given by environment serves clients of every kind.
func TestClientsReadTheDirectory(t *testing.T) {
	a := egress(t, time.Now(), "10.96.0.1")
	key := p256(t)
	chain, err := a.SignFor(request(t, key), "127.0.0.1")
	require.NoError(t, err)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: chain, PrivateKey: key}}})
	require.NoError(t, err)
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) })}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { server.Close() })
	url := "https://" + l.Addr().String()
	pem := file(t, a.Bundle())

	for name, args := range map[string][]string{
		"openssl":  {"s_client", "-connect", l.Addr().String(), "-verify_return_error", "-brief", "-no_ign_eof"},
		"curl":     {"-sS", "--noproxy", "*", url},
		"node":     {"-e", `fetch(process.argv[1]).then(async r => console.log(await r.text()), e => { console.error(e); process.exit(1) })`, url},
		"python3":  {"-c", `import sys, urllib.request as u; print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1]).read())`, url},
		os.Args[0]: {"-test.run=^TestGoClient$", "-test.v"},
	} {
		if _, err := exec.LookPath(name); err != nil {
			t.Logf("no %s on this machine: run tests/setup.sh test", name)
			continue
		}
		for _, ok := range []bool{false, true} {
			cmd := exec.CommandContext(t.Context(), name, args...)
			cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GO_CLIENT_URL=" + url}
			if ok {
				cmd.Env = append(cmd.Env, "SSL_CERT_DIR="+directory(t, a)+":/etc/ssl/certs", "NODE_EXTRA_CA_CERTS="+pem)
			}
			out, err := cmd.CombinedOutput()
			require.Equal(t, ok, err == nil, "%s, given the CA: %t: %s", name, ok, out)
		}
	}
}

// TestGoClient is one of the clients above, in a process of its own.
func TestGoClient(t *testing.T) {
	url := os.Getenv("GO_CLIENT_URL")
	if url == "" {
		t.Skip("run by TestClientsReadTheDirectory")
	}
	r, err := (&http.Client{Transport: &http.Transport{}}).Get(url)
	require.NoError(t, err)
	r.Body.Close()
}
