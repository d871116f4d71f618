package trust

import (
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// openssl runs the program, which is what many clients that are not written in
// Go verify with. tests/setup.sh installs it.
func openssl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), needs.Program(t, "openssl"), args...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func file(t *testing.T, pem []byte) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "x.pem")
	require.NoError(t, os.WriteFile(name, pem, 0o600))
	return name
}

// rotated is a Ring with its bundles and leaves before, while and after it rotates.
func rotated(t *testing.T, key crypto.Signer) (bundles, leaves [][]byte) {
	t.Helper()
	f := Facts{Now: time.Now().Add(-2 * time.Hour), Names: apiNames("10.96.0.1", "fd00::1", "127.0.0.1"), Pods: map[string]time.Time{}}
	r, err := NewRing(f)
	require.NoError(t, err)
	add := func() {
		chain, err := r.Sign(request(t, key), f.Names, f.Now)
		require.NoError(t, err)
		bundles, leaves = append(bundles, r.Bundle()), append(leaves, chain[0])
	}
	add()
	step := func() {
		next, err := r.Step(f)
		require.NoError(t, err)
		require.NotSame(t, r, next)
		r = next
	}
	f.Rotate = "1"
	step()
	add()
	f.Bundled = r.Bundle()
	step()
	f.Now = f.Now.Add(time.Hour)
	step()
	add()
	return bundles, leaves
}

func TestOpenSSLVerifies(t *testing.T) {
	key := p256(t)
	bundles, leaves := rotated(t, key)
	for _, c := range []struct {
		what         string
		leaf, bundle int
		ok           bool
	}{
		{"before", 0, 0, true},
		{"an agent that has not renewed, a pod that knows both", 0, 1, true},
		{"the old signs on, an old pod", 1, 0, true},
		{"the old signs on, a new pod", 1, 1, true},
		{"the new signs, a pod that knows both", 2, 1, true},
		{"the new signs, a pod since", 2, 2, true},
		{"an agent that has not renewed, a pod since", 1, 2, true},
		{"the new signs, a pod that does not know it", 2, 0, false},
	} {
		for _, check := range [][2]string{{"-verify_hostname", "kubernetes.default.svc"}, {"-verify_ip", "10.96.0.1"}, {"-verify_ip", "fd00::1"}} {
			out, err := openssl(t, "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", file(t, bundles[c.bundle]), check[0], check[1], file(t, encodePEM("CERTIFICATE", leaves[c.leaf])))
			require.Equal(t, c.ok, err == nil, "%s: %s", c.what, out)
		}
	}
}

// The holder of the CA's key can still not speak for anybody else.
func TestOpenSSLHoldsTheNameConstraints(t *testing.T) {
	ca, err := NewCA("mesh", apiNames("10.96.0.1").permit, time.Now())
	require.NoError(t, err)
	for what, leaf := range map[string]*x509.Certificate{
		"dns":  {DNSNames: []string{"example.com"}},
		"ipv4": {IPAddresses: []net.IP{net.ParseIP("10.96.0.2").To4()}},
		"ipv6": {IPAddresses: []net.IP{net.ParseIP("fd00::2")}},
	} {
		leaf.NotBefore, leaf.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, leaf, ca.certs[0], p256(t).Public(), ca.key)
		require.NoError(t, err)
		out, err := openssl(t, "verify", "-CAfile", file(t, ca.Bundle()), file(t, encodePEM("CERTIFICATE", der)))
		require.Error(t, err, what)
		require.Contains(t, out, "permitted subtree violation", what)
	}
	out, err := openssl(t, "x509", "-noout", "-text", "-in", file(t, ca.Bundle()))
	require.NoError(t, err, out)
	require.Regexp(t, `Name Constraints: critical\s+Permitted:`, out)
}

// A client's whole handshake with a server that has the leaf, as agents do.
func TestOpenSSLShakesHands(t *testing.T) {
	key := p256(t)
	bundles, leaves := rotated(t, key)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{leaves[2]}, PrivateKey: key}},
	})
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.(*tls.Conn).Handshake()
			c.Close()
		}
	}()
	for i, ok := range []bool{false, true, true} {
		out, err := openssl(t, "s_client", "-connect", l.Addr().String(), "-CAfile", file(t, bundles[i]), "-verify_ip", "127.0.0.1", "-verify_return_error", "-brief", "-no_ign_eof")
		require.Equal(t, ok, err == nil, "bundle %d: %s", i, out)
	}
}
