package reviews

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"time"
)

// authority issues the certificates of one server.
type authority struct {
	cert   *x509.Certificate
	key    crypto.Signer
	issued int64
}

// lifetime is longer than any test.
const lifetime = 24 * time.Hour

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the key of the authority: %w", err)
	}
	template := certificate(1)
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	template.Subject = pkix.Name{CommonName: "reviewer tests"}
	cert, err := sign(template, template, key, key)
	return &authority{cert: cert, key: key, issued: 1}, err
}

// certificate returns a template that is valid now.
func certificate(serial int64) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{SerialNumber: big.NewInt(serial), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(lifetime)}
}

func sign(template, parent *x509.Certificate, of, by crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, of.Public(), by)
	if err != nil {
		return nil, fmt.Errorf("signing a certificate: %w", err)
	}
	return x509.ParseCertificate(der)
}

// issue returns a new certificate for a server name and its key, PEM. Each has the next serial
// number.
func (a *authority) issue(name string) (cert, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making the key of %s: %w", name, err)
	}
	a.issued++
	template := certificate(a.issued)
	template.DNSNames, template.ExtKeyUsage = []string{name}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	leaf, err := sign(template, a.cert, private, a.key)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the key of %s: %w", name, err)
	}
	return encode("CERTIFICATE", leaf.Raw), encode("PRIVATE KEY", der), nil
}

// bundle returns the certificate of the authority, PEM.
func (a *authority) bundle() []byte { return encode("CERTIFICATE", a.cert.Raw) }

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

func encode(kind string, der []byte) []byte {
	var out bytes.Buffer
	_ = pem.Encode(&out, &pem.Block{Type: kind, Bytes: der}) // a buffer takes everything
	return out.Bytes()
}
