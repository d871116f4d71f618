package certdir

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Go computes for hours with primes of a megabyte, if the key lacks what it would check first.
func TestLongRSAKeysAreRejectedUnparsed(t *testing.T) {
	odd := func(bits uint) *big.Int { return new(big.Int).SetBit(big.NewInt(1), int(bits)-1, 1) }
	type key struct {
		Version int
		N       *big.Int
		E       int
		D, P, Q *big.Int
	}
	for name, k := range map[string]key{
		"modulus": {N: odd(100_000), E: 65537, D: odd(100), P: odd(100), Q: odd(100)},
		"prime P": {N: odd(2048), E: 65537, D: odd(100), P: odd(100_000), Q: odd(100)},
		"prime Q": {N: odd(2048), E: 65537, D: odd(100), P: odd(100), Q: odd(100_000)},
	} {
		pkcs1, err := asn1.Marshal(k)
		require.NoError(t, err)
		pkcs8, err := asn1.Marshal(struct {
			Version   int
			Algorithm pkix.AlgorithmIdentifier
			Key       []byte
		}{0, pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}, Parameters: asn1.NullRawValue}, pkcs1})
		require.NoError(t, err)
		for kind, block := range map[string]*pem.Block{
			"PKCS #1": {Type: "RSA PRIVATE KEY", Bytes: pkcs1},
			"PKCS #8": {Type: "PRIVATE KEY", Bytes: pkcs8},
			"other":   {Type: "ANY PRIVATE KEY", Bytes: pkcs1},
		} {
			t.Run(name+" in "+kind, func(t *testing.T) {
				private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
				require.NoError(t, err)
				contents := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE"}), pem.EncodeToMemory(block)...)
				_, err = (&Source{}).parse(certificateOf(t, private.Public(), private), contents)
				require.ErrorContains(t, err, "an RSA key with a number of 100000 bits")
			})
		}
	}
}

func TestRSAKeysAreAccepted(t *testing.T) {
	private, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	for _, block := range []*pem.Block{
		{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(private)}, {Type: "PRIVATE KEY", Bytes: pkcs8},
	} {
		_, err = (&Source{}).parse(certificateOf(t, private.Public(), private), pem.EncodeToMemory(block))
		require.NoError(t, err)
	}
}

func certificateOf(t *testing.T, public, private any) []byte {
	t.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestRejectedContentsAreNotParsedAgain(t *testing.T) {
	var s Source
	_, first := s.parse([]byte("x"), []byte("y"))
	require.Error(t, first)
	_, again := s.parse([]byte("x"), []byte("y"))
	require.Same(t, first, again)
	_, other := s.parse([]byte("xy"), nil)
	require.NotSame(t, first, other)
	for i := range byte(100) {
		_, err := s.parse([]byte{i}, nil)
		require.Error(t, err)
	}
	require.LessOrEqual(t, len(s.rejected), maxRejected)
}
