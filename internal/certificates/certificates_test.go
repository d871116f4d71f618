package certificates

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rsaKey is a key in PKCS #1.
type rsaKey struct {
	Version               int
	N                     *big.Int
	E                     int
	D, P, Q, Dp, Dq, Qinv *big.Int
	More                  []prime `asn1:"optional,omitempty"`
}

type prime struct{ Prime, Exponent, Coefficient *big.Int }

func number(bits int) *big.Int { return new(big.Int).SetBit(big.NewInt(1), bits-1, 1) }

// newRSA returns a key that has the form of one, after a change.
func newRSA(change func(*rsaKey)) []byte {
	short := number(100)
	k := rsaKey{N: number(2048), E: 65537, D: short, P: short, Q: short, Dp: short, Dq: short, Qinv: short}
	change(&k)
	der, err := asn1.Marshal(k)
	if err != nil {
		panic(err)
	}
	return der
}

// wrap returns a key in PKCS #8.
func wrap(pkcs1 []byte) []byte {
	der, err := asn1.Marshal(struct {
		Version   int
		Algorithm pkix.AlgorithmIdentifier
		Key       []byte
	}{0, pkix.AlgorithmIdentifier{Algorithm: asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 1}, Parameters: asn1.NullRawValue}, pkcs1})
	if err != nil {
		panic(err)
	}
	return der
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func TestCostlyRSAKeysAreRejectedUnparsed(t *testing.T) {
	const long = 100_000
	const (
		message  = "an RSA key has a number of 100000 bits, and at most 4096 are accepted there: use a key of at most 4096 bits"
		ofPrimes = "an RSA key has a number of 100000 bits, and at most 2048 are accepted there: use a key of at most 4096 bits"
	)
	cert := certificateOf(t, newKey(t))
	for name, c := range map[string]struct {
		change func(*rsaKey)
		want   string
	}{
		"modulus":          {func(k *rsaKey) { k.N = number(long) }, message},
		"private exponent": {func(k *rsaKey) { k.D = number(long) }, message},
		"prime P":          {func(k *rsaKey) { k.P = number(long) }, ofPrimes},
		"prime Q":          {func(k *rsaKey) { k.Q = number(long) }, ofPrimes},
		"exponent of Q":    {func(k *rsaKey) { k.Dq = number(long) }, ofPrimes},
		"coefficient":      {func(k *rsaKey) { k.Qinv = number(long) }, ofPrimes},
		"third prime":      {func(k *rsaKey) { k.More = []prime{{number(long), number(9), number(9)}} }, errPrimes.Error()},
		"many primes":      {func(k *rsaKey) { k.More = slices.Repeat([]prime{{number(9), number(9), number(9)}}, 1000) }, errPrimes.Error()},
	} {
		pkcs1 := newRSA(c.change)
		for form, key := range map[string][]byte{
			"PKCS #1": encode("RSA PRIVATE KEY", pkcs1),
			"PKCS #8": encode("PRIVATE KEY", wrap(pkcs1)),
			"other":   encode("ANY PRIVATE KEY", pkcs1),
		} {
			t.Run(name+" in "+form, func(t *testing.T) {
				_, err := Pair(cert, append(encode("CERTIFICATE", nil), key...))
				require.EqualError(t, err, c.want)
			})
		}
	}
}

// Parsers of keys ignore what follows the parts that they know.
func TestUnreadablePartsHideNoLongNumbers(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, maxPrivate+512)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	garbage := []byte{0x30, 0x00, 0x1f} // no further primes, and the beginning of a tag
	for kind, der := range map[string][]byte{"RSA PRIVATE KEY": x509.MarshalPKCS1PrivateKey(key), "PRIVATE KEY": pkcs8} {
		var whole asn1.RawValue
		_, err = asn1.Unmarshal(der, &whole)
		require.NoError(t, err)
		hidden, err := asn1.Marshal(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: append(whole.Bytes, garbage...)})
		require.NoError(t, err)
		_, err = Pair(certificateOf(t, key), encode(kind, hidden))
		require.ErrorContains(t, err, "not in DER", kind)
	}
}

func TestUsualKeysAreAccepted(t *testing.T) {
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	short, err := rsa.GenerateKey(rand.Reader, maxPrivate)
	require.NoError(t, err)
	for _, key := range []crypto.Signer{short, newKey(t), ed} {
		cert := certificateOf(t, key)
		der, err := x509.MarshalPKCS8PrivateKey(key)
		require.NoError(t, err)
		forms := [][]byte{encode("PRIVATE KEY", der)}
		switch key := key.(type) {
		case *rsa.PrivateKey:
			forms = append(forms, encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)))
		case *ecdsa.PrivateKey:
			der, err = x509.MarshalECPrivateKey(key)
			require.NoError(t, err)
			forms = append(forms, append(encode("EC PARAMETERS", nil), encode("EC PRIVATE KEY", der)...))
		}
		for _, form := range forms {
			pair, err := Pair(cert, form)
			require.NoError(t, err)
			require.NotNil(t, pair.PrivateKey)
		}
	}
	_, err = Pair(certificateOf(t, newKey(t)), nil)
	require.Error(t, err)
}

func TestPoolOmitsLongKeys(t *testing.T) {
	signer := newKey(t)
	good := certificateOf(t, signer)
	long := certificateBy(t, &rsa.PublicKey{N: number(maxAuthority + 1), E: 65537}, signer)
	require.Nil(t, Pool(nil))
	require.Nil(t, Pool(long))
	require.Nil(t, Pool(encode("CERTIFICATE", []byte("x"))))
	require.True(t, Pool(good).Equal(Pool(slices.Concat(long, encode("OTHER", nil), encode("CERTIFICATE", nil), good))))
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

func certificateOf(t *testing.T, key crypto.Signer) []byte {
	t.Helper()
	return certificateBy(t, key.Public(), key)
}

func certificateBy(t *testing.T, public any, signer crypto.Signer) []byte {
	t.Helper()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, signer)
	require.NoError(t, err)
	return encode("CERTIFICATE", der)
}

func FuzzPair(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add(encode("CERTIFICATE", nil), encode("PRIVATE KEY", wrap(newRSA(func(*rsaKey) {}))))
	f.Add(encode("CERTIFICATE", nil), encode("RSA PRIVATE KEY", newRSA(func(k *rsaKey) { k.More = []prime{{number(9), number(9), number(9)}} })))
	f.Fuzz(func(t *testing.T, cert, key []byte) {
		pair, err := Pair(cert, key)
		if err != nil {
			return
		}
		if k, ok := pair.PrivateKey.(*rsa.PrivateKey); ok {
			require.LessOrEqual(t, k.N.BitLen(), maxPrivate)
			require.Len(t, k.Primes, 2)
		}
	})
}

func FuzzPool(f *testing.F) {
	f.Add(encode("CERTIFICATE", nil))
	f.Fuzz(func(_ *testing.T, bundle []byte) { Pool(bundle) })
}

// BenchmarkLongestKey measures what the costliest file costs that is parsed.
func BenchmarkLongestKey(b *testing.B) {
	odd := func(bits int) *big.Int {
		x, err := rand.Int(rand.Reader, number(bits-1))
		require.NoError(b, err)
		x.SetBit(x, bits-1, 1)
		return x.SetBit(x, 0, 1)
	}
	one := big.NewInt(1)
	var k rsaKey
	for k.D == nil || k.Qinv == nil {
		k = rsaKey{E: 65537, P: odd(maxPrivate / 2), Q: odd(maxPrivate / 2)}
		less := func(p *big.Int) *big.Int { return new(big.Int).Sub(p, one) }
		k.N = new(big.Int).Mul(k.P, k.Q)
		k.D = new(big.Int).ModInverse(big.NewInt(int64(k.E)), new(big.Int).Mul(less(k.P), less(k.Q)))
		k.Qinv = new(big.Int).ModInverse(k.Q, k.P)
		if k.D != nil {
			k.Dp, k.Dq = new(big.Int).Mod(k.D, less(k.P)), new(big.Int).Mod(k.D, less(k.Q))
		}
	}
	der, err := asn1.Marshal(k)
	require.NoError(b, err)
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(b, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, signer.Public(), signer)
	require.NoError(b, err)
	for b.Loop() {
		_, _ = Pair(encode("CERTIFICATE", cert), encode("PRIVATE KEY", wrap(der)))
	}
}
