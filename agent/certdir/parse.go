package certdir

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"math/big"
	"strings"
)

const (
	// maxRSA bounds the modulus and the primes of an RSA key in bits. Go computes with the
	// primes before it compares them with the modulus, for minutes if they are long.
	maxRSA = 8192
	// maxRejected bounds the contents that are remembered.
	maxRejected = 16
)

// parse returns the certificate with its key. Contents that were rejected are not parsed again.
func (s *Source) parse(cert, key []byte) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	parts := [2][sha256.Size]byte{sha256.Sum256(cert), sha256.Sum256(key)}
	hash := sha256.Sum256(append(parts[0][:], parts[1][:]...))
	if err := s.rejected[hash]; err != nil {
		return nil, err
	}
	err := checkKey(key)
	if err == nil {
		var pair tls.Certificate
		if pair, err = tls.X509KeyPair(cert, key); err == nil {
			return &pair, nil
		}
	}
	if s.rejected == nil || len(s.rejected) >= maxRejected {
		s.rejected = map[[sha256.Size]byte]error{}
	}
	s.rejected[hash] = err
	return nil, err
}

// checkKey rejects an RSA key that is too long. It looks at the block that tls.X509KeyPair
// parses, and decodes the same beginning of it. Anything else is left to that function.
func checkKey(contents []byte) error {
	for {
		var block *pem.Block
		if block, contents = pem.Decode(contents); block == nil {
			return nil
		}
		if block.Type == "PRIVATE KEY" || strings.HasSuffix(block.Type, " PRIVATE KEY") {
			return checkRSA(block.Bytes)
		}
	}
}

// checkRSA rejects a key in PKCS #1 or PKCS #8 that is too long.
func checkRSA(der []byte) error {
	var wrapped struct { // PKCS #8, RFC 5958
		Version   int
		Algorithm pkix.AlgorithmIdentifier
		Key       []byte
	}
	if _, err := asn1.Unmarshal(der, &wrapped); err == nil {
		der = wrapped.Key
	}
	var key struct { // PKCS #1, RFC 8017
		Version int
		N       *big.Int
		E       int
		D, P, Q *big.Int
	}
	if _, err := asn1.Unmarshal(der, &key); err != nil {
		return nil //nolint:nilerr // it is no RSA key
	}
	for _, n := range []*big.Int{key.N, key.D, key.P, key.Q} {
		if n.BitLen() > maxRSA {
			return fmt.Errorf("an RSA key with a number of %d bits is longer than %d bits", n.BitLen(), maxRSA)
		}
	}
	return nil
}
