package trust

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"net/netip"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

var now = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func apiNames(ips ...string) Names {
	var addrs []netip.Addr
	for _, ip := range ips {
		addrs = append(addrs, netip.MustParseAddr(ip))
	}
	return APIServerNames("cluster.local", Names{IPs: addrs})
}

func request(t *testing.T, key crypto.Signer) []byte {
	t.Helper()
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "evil"}, DNSNames: []string{"evil.example.com"},
	}, key)
	require.NoError(t, err)
	return csr
}

func p256(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return k
}

func pool(t *testing.T, pem []byte) *x509.CertPool {
	t.Helper()
	p := x509.NewCertPool()
	require.True(t, p.AppendCertsFromPEM(pem))
	return p
}

func TestLeaf(t *testing.T) {
	ca, err := NewCA("mesh", apiNames("10.96.0.1", "fd00::1").permit, now)
	require.NoError(t, err)
	chain, err := ca.SignRequest(request(t, p256(t)), apiNames("10.96.0.1", "fd00::1"), leafLife, now)
	require.NoError(t, err)
	require.Len(t, chain, 2)
	leaf, err := x509.ParseCertificate(chain[0])
	require.NoError(t, err)
	for _, name := range []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "10.96.0.1", "fd00::1"} {
		_, err := leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: pool(t, ca.Bundle()), CurrentTime: now})
		require.NoError(t, err, name)
	}
	require.NotContains(t, leaf.DNSNames, "evil.example.com", "the request's own names are ignored")
	_, err = leaf.Verify(x509.VerifyOptions{Roots: pool(t, ca.Bundle()), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	require.Error(t, err, "not a client's certificate")
	require.LessOrEqual(t, leaf.NotAfter.Sub(now), 24*time.Hour)
}

// The holder of the key can still not speak for anybody else.
func TestNameConstraints(t *testing.T) {
	ca, err := NewCA("mesh", apiNames("10.96.0.1").permit, now)
	require.NoError(t, err)
	u, _ := url.Parse("spiffe://cluster.local/ns/x")
	for what, leaf := range map[string]*x509.Certificate{
		"dns":           {DNSNames: []string{"example.com"}},
		"another of us": {DNSNames: []string{"kubernetes", "other.default.svc"}},
		"ipv4":          {IPAddresses: []net.IP{net.ParseIP("10.96.0.2")}},
		"ipv6":          {IPAddresses: []net.IP{net.ParseIP("fd00::2")}},
		"email":         {EmailAddresses: []string{"a@example.com"}},
		"uri":           {URIs: []*url.URL{u}},
	} {
		leaf.NotBefore, leaf.NotAfter = now, now.Add(time.Hour)
		key := p256(t)
		der, err := x509.CreateCertificate(rand.Reader, leaf, ca.certs[0], key.Public(), ca.key)
		require.NoError(t, err)
		cert, err := x509.ParseCertificate(der)
		require.NoError(t, err)
		_, err = cert.Verify(x509.VerifyOptions{Roots: pool(t, ca.Bundle()), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		require.Error(t, err, what)
	}
	require.True(t, ca.certs[0].PermittedDNSDomainsCritical)

	// Nor make another CA.
	sub := &x509.Certificate{NotBefore: now, NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	subKey := p256(t)
	der, err := x509.CreateCertificate(rand.Reader, sub, ca.certs[0], subKey.Public(), ca.key)
	require.NoError(t, err)
	subCert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	leaf := &x509.Certificate{NotBefore: now, NotAfter: now.Add(time.Hour), DNSNames: []string{"kubernetes"}}
	der, err = x509.CreateCertificate(rand.Reader, leaf, subCert, p256(t).Public(), subKey)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	inter := x509.NewCertPool()
	inter.AddCert(subCert)
	_, err = cert.Verify(x509.VerifyOptions{Roots: pool(t, ca.Bundle()), Intermediates: inter, CurrentTime: now, DNSName: "kubernetes"})
	require.Error(t, err)
}

func TestNoAddressPermitsNone(t *testing.T) {
	ca, err := NewCA("serving", ManagerNames("ns", "cluster.local", "svc").permit, now)
	require.NoError(t, err)
	leaf := &x509.Certificate{NotBefore: now, NotAfter: now.Add(time.Hour), IPAddresses: []net.IP{net.ParseIP("10.0.0.1")}}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca.certs[0], p256(t).Public(), ca.key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	_, err = cert.Verify(x509.VerifyOptions{Roots: pool(t, ca.Bundle()), CurrentTime: now})
	require.Error(t, err)
}

func TestKeysOfRequests(t *testing.T) {
	ca, err := NewCA("mesh", apiNames("10.96.0.1").permit, now)
	require.NoError(t, err)
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	require.NoError(t, err)
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	for _, key := range []crypto.Signer{p256(t), p384, ed} {
		_, err := ca.SignRequest(request(t, key), apiNames("10.96.0.1"), leafLife, now)
		require.NoError(t, err)
	}
	weak, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	p521, err := ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	require.NoError(t, err)
	good := request(t, p256(t))
	tampered := append([]byte(nil), good...)
	tampered[len(tampered)-1] ^= 1
	for what, csr := range map[string][]byte{
		"rsa": request(t, weak), "p521": request(t, p521), "empty": nil, "rubbish": []byte("x"),
		"tampered": tampered, "too large": make([]byte, maxCSR+1),
	} {
		_, err := ca.SignRequest(csr, apiNames("10.96.0.1"), leafLife, now)
		require.Error(t, err, what)
	}
}

func secrets(t *testing.T) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	return fake.NewClientBuilder().WithScheme(scheme).Build()
}

func TestReplicasShareOneCA(t *testing.T) {
	c, ctx := secrets(t), context.Background()
	clock := func() time.Time { return now }
	names := apiNames("10.96.0.1")
	named := func() Names { return names }
	a, b := &Authority{Client: c, Namespace: "mesh", Names: named, Now: clock}, &Authority{Client: c, Namespace: "mesh", Names: named, Now: clock}
	require.Nil(t, a.Bundle())
	errs := make(chan error, 2)
	for _, x := range []*Authority{a, b} {
		go func() { errs <- x.Load(ctx) }()
	}
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
	require.Equal(t, string(a.Bundle()), string(b.Bundle()))

	names = apiNames("10.96.0.1", "10.0.0.9")
	require.NoError(t, a.Maintain(ctx, nil, nil))
	require.NotEqual(t, string(a.Bundle()), string(b.Bundle()))
	require.NoError(t, b.Load(ctx))
	require.Equal(t, string(a.Bundle()), string(b.Bundle()))

	_, err := a.Sign(request(t, p256(t)))
	require.NoError(t, err)
}

func TestDamagedMeshCAIsNotReplaced(t *testing.T) {
	c, ctx := secrets(t), context.Background()
	a := &Authority{Client: c, Namespace: "mesh", Names: func() Names { return apiNames("10.96.0.1") }, Now: time.Now}
	require.NoError(t, a.Load(ctx))
	s := &corev1.Secret{}
	require.NoError(t, c.Get(ctx, types.NamespacedName{Namespace: "mesh", Name: MeshCASecret}, s))
	s.Data["ca.key"] = []byte("very secret rubbish")
	require.NoError(t, c.Update(ctx, s))
	err := a.Maintain(ctx, nil, nil)
	require.ErrorContains(t, err, "damaged")
	require.NotContains(t, err.Error(), "very secret")
}

func TestServingRenewsAndRepairs(t *testing.T) {
	c, ctx := secrets(t), context.Background()
	clock := now
	s := &Serving{Client: c, Namespace: "mesh", Names: ManagerNames("mesh", "cluster.local", "ctrlmesh-manager", "ctrlmesh-webhook"), Now: func() time.Time { return clock }}
	_, err := s.GetCertificate(nil)
	require.Error(t, err)
	require.NoError(t, s.Load(ctx))
	first, err := s.GetCertificate(nil)
	require.NoError(t, err)
	for _, name := range []string{"ctrlmesh-manager.mesh.svc", "ctrlmesh-webhook.mesh.svc", "ctrlmesh-webhook.mesh.svc.cluster.local"} {
		_, err = first.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: pool(t, s.Bundle()), CurrentTime: clock})
		require.NoError(t, err)
	}

	require.NoError(t, s.Maintain(ctx, nil))
	same, _ := s.GetCertificate(nil)
	require.Equal(t, first.Leaf.Raw, same.Leaf.Raw)

	clock = now.Add(61 * 24 * time.Hour)
	bundle := s.Bundle()
	require.NoError(t, s.Maintain(ctx, nil))
	renewed, _ := s.GetCertificate(nil)
	require.NotEqual(t, first.Leaf.Raw, renewed.Leaf.Raw)
	_, err = renewed.Leaf.Verify(x509.VerifyOptions{DNSName: "ctrlmesh-manager.mesh.svc", Roots: pool(t, bundle), CurrentTime: clock})
	require.NoError(t, err, "those who know the CA need not hear of it")

	secret := &corev1.Secret{}
	require.NoError(t, c.Get(ctx, types.NamespacedName{Namespace: "mesh", Name: ServingSecret}, secret))
	secret.Data = nil
	require.NoError(t, c.Update(ctx, secret))
	require.Error(t, s.Load(ctx))
	require.NoError(t, s.Maintain(ctx, nil))
	require.NoError(t, s.Load(ctx))
}

// The manager's own CA rotates too, and nobody who reads what is
// published loses sight of the manager.
func TestServingRotates(t *testing.T) {
	c, ctx := secrets(t), context.Background()
	clock := now
	s := &Serving{Client: c, Namespace: "mesh", Names: ManagerNames("mesh", "cluster.local", "ctrlmesh-manager"), Now: func() time.Time { return clock }}
	require.NoError(t, s.Load(ctx))
	first, published := s.Bundle(), s.Bundle()
	late := published // what a replica, an agent or the apiserver may still have
	verifies := func() {
		cert, err := s.GetCertificate(nil)
		require.NoError(t, err)
		for _, roots := range [][]byte{published, late} {
			require.NoError(t, verify(cert.Certificate, roots, "ctrlmesh-manager.mesh.svc", clock))
		}
	}
	clock = now.Add(caLife / 3 * 2)
	require.NoError(t, s.Maintain(ctx, published))
	require.Equal(t, 2, bytes.Count(s.Bundle(), []byte("BEGIN")))
	for range 30 { // the bundle cannot be published
		clock = clock.Add(time.Minute)
		require.NoError(t, s.Maintain(ctx, published))
		verifies()
	}
	for range 30 {
		published = s.Bundle()
		clock = clock.Add(time.Minute)
		require.NoError(t, s.Maintain(ctx, published))
		verifies()
		late = published
	}
	require.False(t, bytes.HasPrefix(s.Bundle(), first), "another signs")
	clock = clock.Add(2 * leafLife)
	require.NoError(t, s.Maintain(ctx, published))
	require.Equal(t, 1, bytes.Count(s.Bundle(), []byte("BEGIN")))
	published, late = s.Bundle(), s.Bundle()
	verifies()
}
