// pki DIR API_URL ADMIN_URL API_IP[,API_IP]... NODE=IP[,IP]...
//
// writes the CAs, certificates, service-account keys and kubeconfigs of a cluster into DIR. The
// admin's kubeconfig names ADMIN_URL (from outside), all others API_URL.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"log"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

var dir string

type kp struct {
	cert    *x509.Certificate
	key     *ecdsa.PrivateKey
	certPEM []byte
	keyPEM  []byte
}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

func write(name string, b []byte) {
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
		log.Fatal(err)
	}
}

func mk(name string, subj pkix.Name, ca *kp, isCA bool, usage []x509.ExtKeyUsage, dns []string, ips []net.IP) *kp {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	t := &x509.Certificate{
		SerialNumber: must(rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))),
		Subject:      subj, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(3650 * 24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: usage, DNSNames: dns, IPAddresses: ips, BasicConstraintsValid: true,
	}
	parent, signer := t, key
	if isCA {
		t.IsCA = true
		t.KeyUsage |= x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	} else {
		parent, signer = ca.cert, ca.key
	}
	der := must(x509.CreateCertificate(rand.Reader, t, parent, &key.PublicKey, signer))
	p := &kp{cert: must(x509.ParseCertificate(der)), key: key,
		certPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		keyPEM:  pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: must(x509.MarshalECPrivateKey(key))})}
	write(name+".crt", p.certPEM)
	write(name+".key", p.keyPEM)
	return p
}

func kubeconfig(name, server string, ca, c *kp) {
	b := base64.StdEncoding.EncodeToString
	write(name+".kubeconfig", []byte(fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: local
  cluster: {server: %q, certificate-authority-data: %s}
users:
- name: u
  user: {client-certificate-data: %s, client-key-data: %s}
contexts:
- name: local
  context: {cluster: local, user: u}
current-context: local
`, server, b(ca.certPEM), b(c.certPEM), b(c.keyPEM))))
}

// local is the loopback's addresses and others, joined by commas.
func local(others string) []net.IP {
	ips := []net.IP{net.ParseIP("127.0.0.1"), net.ParseIP("::1")}
	for _, s := range strings.Split(others, ",") {
		ips = append(ips, net.ParseIP(s))
	}
	return ips
}

func main() {
	dir = os.Args[1]
	server, outside := os.Args[2], os.Args[3]
	if err := os.MkdirAll(dir, 0o700); err != nil {
		log.Fatal(err)
	}
	cl := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	sv := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	ca := mk("ca", pkix.Name{CommonName: "kubernetes-ca"}, nil, true, nil, nil, nil)
	fp := mk("front-proxy-ca", pkix.Name{CommonName: "front-proxy-ca"}, nil, true, nil, nil, nil)
	mk("apiserver", pkix.Name{CommonName: "kube-apiserver"}, ca, false, sv,
		[]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}, local(os.Args[4]))
	mk("apiserver-kubelet-client", pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}}, ca, false, cl, nil, nil)
	mk("front-proxy-client", pkix.Name{CommonName: "front-proxy-client"}, fp, false, cl, nil, nil)
	sa := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	write("sa.key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: must(x509.MarshalECPrivateKey(sa))}))
	write("sa.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: must(x509.MarshalPKIXPublicKey(&sa.PublicKey))}))
	user := func(name, server, cn string, org ...string) {
		kubeconfig(name, server, ca, mk(name, pkix.Name{CommonName: cn, Organization: org}, ca, false, cl, nil, nil))
	}
	user("admin", outside, "kubernetes-admin", "system:masters")
	user("kube-controller-manager", server, "system:kube-controller-manager")
	user("kube-scheduler", server, "system:kube-scheduler")
	user("kube-proxy", server, "system:kube-proxy")
	for _, a := range os.Args[5:] {
		n, ips, _ := strings.Cut(a, "=")
		user(n, server, "system:node:"+n, "system:nodes")
		mk(n+"-serving", pkix.Name{CommonName: "system:node:" + n, Organization: []string{"system:nodes"}}, ca, false, sv, []string{n, "localhost"}, local(ips))
	}
}
