package trust

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

const (
	caLife = 10 * 365 * 24 * time.Hour
	// clocks of nodes may be behind ours.
	backdate = 5 * time.Minute
	// A volume follows its ConfigMap within about a minute, other replicas and
	// clocks are not far behind: what is published for so long is known.
	settle = 10 * time.Minute
	maxCSR = 8 << 10
)

// CA is a key and its certificates, newest first. It has one certificate, unless it was
// created by a version of the manager that did not rotate. It is immutable.
type CA struct {
	key   *ecdsa.PrivateKey
	certs []*x509.Certificate
}

// NewCA creates a key and a CA certificate that constrain bounds: Names.permit to the names, or
// Names.exclude to all others.
func NewCA(commonName string, constrain func(*x509.Certificate), now time.Time) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert, err := certify(key, commonName, constrain, now)
	if err != nil {
		return nil, err
	}
	return &CA{key: key, certs: []*x509.Certificate{cert}}, nil
}

func certify(key *ecdsa.PrivateKey, commonName string, constrain func(*x509.Certificate), now time.Time) (*x509.Certificate, error) {
	template := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{"ctrlmesh"}, CommonName: commonName},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,

		PermittedDNSDomainsCritical: true, // all constraints, in spite of its name
		// A constraint binds only names of its own type. Types that the mesh has
		// no use for are bound to a domain that cannot exist (RFC 2606).
		PermittedEmailAddresses: []string{"ctrlmesh.invalid"},
		PermittedURIDomains:     []string{"ctrlmesh.invalid"},
	}
	constrain(template)
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// Stale reports whether a new CA is due: the newest certificate is not constrained by one
// of names, or two thirds of its validity have passed. A name that was removed is no reason,
// because apiservers may return.
func (ca *CA) Stale(names Names, now time.Time) bool {
	newest := ca.certs[0]
	return !boundBy(newest, names) || now.After(renewal(newest))
}

// Bundle returns the certificates in PEM, newest first.
func (ca *CA) Bundle() []byte {
	return encodeCerts(ca.certs)
}

// Expiry returns when the newest certificate expires.
func (ca *CA) Expiry() time.Time { return ca.certs[0].NotAfter }

// Usable returns the part of names that every certificate permits, so that a leaf for them
// is valid for all clients, whichever certificate they trust.
func (ca *CA) Usable(names Names) Names {
	for _, c := range ca.certs {
		names.DNS = collect.Filter(names.DNS, func(d string) bool { return permitsDNS(c, d) })
		names.IPs = collect.Filter(names.IPs, func(ip netip.Addr) bool { return permitsIP(c, ip) })
	}
	return names.sorted()
}

// SignRequest signs the public key of a PKCS #10 request for names; whatever
// else the request asks is ignored. It returns DER, leaf first.
func (ca *CA) SignRequest(csr []byte, names Names, life time.Duration, now time.Time) ([][]byte, error) {
	if len(csr) > maxCSR {
		return nil, errors.New("the certificate request is too large")
	}
	req, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, fmt.Errorf("parsing the certificate request: %w", err)
	}
	// The key is checked first: verifying by a long RSA key takes time.
	switch k := req.PublicKey.(type) {
	case ed25519.PublicKey:
	case *ecdsa.PublicKey:
		if k.Curve != elliptic.P256() && k.Curve != elliptic.P384() {
			return nil, errors.New("the key must be of the curve P-256 or P-384, or Ed25519")
		}
	default:
		return nil, errors.New("the key must be ECDSA or Ed25519")
	}
	if err := req.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the certificate request is not signed by its own key: %w", err)
	}
	leaf, err := ca.sign(req.PublicKey, names, life, now)
	if err != nil {
		return nil, err
	}
	return [][]byte{leaf, ca.certs[0].Raw}, nil
}

func (ca *CA) sign(key crypto.PublicKey, names Names, life time.Duration, now time.Time) ([]byte, error) {
	names = ca.Usable(names)
	if len(names.DNS)+len(names.IPs) == 0 {
		return nil, errors.New("the CA permits none of the names to be signed")
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{"ctrlmesh"}, CommonName: "ctrlmesh"},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(life),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		DNSNames:              names.DNS,
	}
	template.IPAddresses = collect.Map(names.IPs, func(ip netip.Addr) net.IP { return ip.AsSlice() })
	return x509.CreateCertificate(rand.Reader, template, ca.certs[0], key, ca.key)
}

// A Secret holds a CA under two keys, PREFIX.key and PREFIX.crt.
const (
	signerPrefix = "ca"
	keySuffix    = ".key"
	certSuffix   = ".crt"
)

func (ca *CA) encode(prefix string, into map[string][]byte) error {
	der, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		return err
	}
	into[prefix+keySuffix] = encodePEM("PRIVATE KEY", der)
	into[prefix+certSuffix] = ca.Bundle()
	return nil
}

// decodeCA reads a CA from a Secret's data. Errors contain nothing of the data.
func decodeCA(prefix string, data map[string][]byte) (*CA, error) {
	keyName, certName := prefix+keySuffix, prefix+certSuffix
	key, err := decodeKey(data[keyName])
	if err != nil {
		return nil, fmt.Errorf("key %s: %w", keyName, err)
	}
	certs, err := decodeCerts(data[certName])
	if err != nil {
		return nil, fmt.Errorf("key %s: %w", certName, err)
	}
	for _, c := range certs {
		if !key.PublicKey.Equal(c.PublicKey) || !c.IsCA {
			return nil, fmt.Errorf("key %s: a certificate is not of the key in %s", certName, keyName)
		}
	}
	return &CA{key: key, certs: certs}, nil
}

func decodeKey(data []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, errors.New("no PEM in it")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("not a PKCS #8 private key")
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, errors.New("not an ECDSA key")
	}
	return key, nil
}

func decodeCerts(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, errors.New("no certificate in it")
	}
	return certs, nil
}

// renewal is two thirds of a certificate's life.
func renewal(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2)
}

// boundBy reports whether a certificate permits all of names or, if it is the egress
// CA's, excludes them all.
func boundBy(c *x509.Certificate, names Names) bool {
	bounds := boundsOf(c)
	return sets.New(bounds.DNS...).HasAll(names.DNS...) && sets.New(bounds.IPs...).HasAll(names.IPs...)
}

// encodeCerts returns certificates in PEM.
func encodeCerts(certs []*x509.Certificate) (out []byte) {
	for _, c := range certs {
		out = append(out, encodePEM("CERTIFICATE", c.Raw)...)
	}
	return out
}

func encodePEM(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
