// Package certificates parses certificates and keys that others supply. It bounds what they
// cost: Go computes with the numbers of a key before it compares them with each other, for
// seconds if they are long.
package certificates

import (
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"
)

// Bounds of RSA keys in bits. To verify by an authority of a megabit takes a minute; 8192 is
// the bound of crypto/tls on the keys of its peers. To sign by 8192 bits takes 0.15 s in each
// handshake, by 4096 bits 0.01 s.
const (
	maxAuthority = 8192
	maxPrivate   = 4096
)

// errPrimes means that an RSA key is of a kind that is deprecated (RFC 8017, version 1).
var errPrimes = errors.New("an RSA key with more than two primes is not supported: generate one with two")

// Pair returns a certificate with its key, both in PEM. Errors contain nothing of the key.
func Pair(cert, key []byte) (*tls.Certificate, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	if rsaKey, ok := pair.PrivateKey.(*rsa.PrivateKey); ok && rsaKey.N.BitLen() > maxPrivate {
		return nil, tooLong(rsaKey.N.BitLen(), maxPrivate)
	}
	return &pair, nil
}

// Pool returns the authorities in a PEM bundle; nil if there are none. It omits certificates
// that are invalid, or whose key is too long: it takes seconds to verify with.
func Pool(bundle []byte) *x509.CertPool {
	var pool *x509.CertPool
	for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			continue
		}
		if key, ok := cert.PublicKey.(*rsa.PublicKey); ok && key.N.BitLen() > maxAuthority {
			continue
		}
		if pool == nil {
			pool = x509.NewCertPool()
		}
		pool.AddCert(cert)
	}
	return pool
}

// checkKey rejects an RSA key that is too long. It looks at the block that tls.X509KeyPair
// parses. Anything else is left to that function.
func checkKey(contents []byte) error {
	for block, rest := pem.Decode(contents); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "PRIVATE KEY" && !strings.HasSuffix(block.Type, " PRIVATE KEY") {
			continue
		}
		parts, err := partsOf(block.Bytes)
		if err != nil {
			return err
		}
		const key = 2 // in PKCS #8, RFC 5958, after the version and the algorithm
		if len(parts) > key && parts[key].Tag == asn1.TagOctetString {
			inner, err := partsOf(parts[key].Bytes)
			if err := errors.Join(err, checkNumbers(inner)); err != nil {
				return err
			}
		}
		return checkNumbers(parts)
	}
	return nil
}

// partsOf returns the parts of a sequence in DER; nil if it is none. Each must be readable:
// parsers of keys ignore what follows the parts that they know.
func partsOf(der []byte) (parts []asn1.RawValue, err error) {
	var whole asn1.RawValue
	if _, err := asn1.Unmarshal(der, &whole); err != nil || whole.Class != asn1.ClassUniversal || whole.Tag != asn1.TagSequence {
		return nil, nil // no sequence
	}
	for rest := whole.Bytes; len(rest) > 0; {
		var part asn1.RawValue
		if rest, err = asn1.Unmarshal(rest, &part); err != nil {
			return nil, errors.New("a private key is not in DER: generate it anew, or convert it by openssl pkcs8")
		}
		parts = append(parts, part)
	}
	return parts, nil
}

// checkNumbers rejects long numbers among the parts of a key. PKCS #1, RFC 8017, has the
// version, N, E and D, then two primes and their numbers, which are half as long. Then, or
// earlier, a sequence of further primes follows.
func checkNumbers(parts []asn1.RawValue) error {
	const primes = 4
	for i, part := range parts {
		if part.Class != asn1.ClassUniversal {
			continue
		}
		limit := maxPrivate
		if i >= primes {
			limit /= 2
		}
		// The first byte may be zero, for the sign.
		if bits := 8 * (len(part.Bytes) - 1); part.Tag == asn1.TagInteger && bits > limit {
			return tooLong(bits, limit)
		}
		if part.Tag == asn1.TagSequence && i >= primes {
			return errPrimes
		}
	}
	return nil
}

func tooLong(bits, limit int) error {
	return fmt.Errorf("an RSA key has a number of %d bits, and at most %d are accepted there: use a key of at most %d bits", bits, limit, maxPrivate)
}
