package egress

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/cryptobyte"
)

// script is a connection with a fixed input, which records what is written.
type script struct {
	net.Conn
	in  io.Reader
	out bytes.Buffer
}

func (s *script) Read(b []byte) (int, error)       { return s.in.Read(b) }
func (s *script) Write(b []byte) (int, error)      { return s.out.Write(b) }
func (s *script) Close() error                     { return nil }
func (s *script) SetDeadline(time.Time) error      { return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// clientHello returns the first bytes that crypto/tls sends.
func clientHello(t testing.TB, c *tls.Config) []byte {
	s := &script{in: strings.NewReader("")}
	require.Error(t, tls.Client(s, c).HandshakeContext(context.Background()))
	require.NotEmpty(t, s.out.Bytes())
	return s.out.Bytes()
}

// oracle returns the contents of a ClientHello as crypto/tls reads it.
func oracle(b []byte) (name string, alpn []string, ok bool) {
	s := &script{in: bytes.NewReader(b)}
	_ = tls.Server(s, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name, alpn, ok = h.ServerName, h.SupportedProtos, true
		return nil, errors.New("enough")
	}}).HandshakeContext(context.Background())
	return name, alpn, ok
}

// fragment cuts the handshake message of a record into records of n bytes.
func fragment(record []byte, n int) (out []byte) {
	for rest := record[5:]; len(rest) > 0; {
		piece := rest[:min(n, len(rest))]
		rest = rest[len(piece):]
		out = append(out, record[0], record[1], record[2], byte(len(piece)>>8), byte(len(piece)))
		out = append(out, piece...)
	}
	return out
}

func hellos(t testing.TB) map[string][]byte {
	long := make([]string, 60)
	for i := range long {
		long[i] = strings.Repeat(string(rune('a'+i%26)), 200)
	}
	out := map[string][]byte{
		"a name":  clientHello(t, &tls.Config{ServerName: "API.Example.com"}),
		"no name": clientHello(t, &tls.Config{InsecureSkipVerify: true}),
		"ALPN":    clientHello(t, &tls.Config{ServerName: "a.b", NextProtos: []string{"h2", "http/1.1"}}),
		"TLS 1.2": clientHello(t, &tls.Config{ServerName: "a.b", MaxVersion: tls.VersionTLS12}),
		"long":    clientHello(t, &tls.Config{ServerName: "a.b", NextProtos: long}),
		"under _": clientHello(t, &tls.Config{ServerName: "_a.b-c.d1"}),
	}
	out["fragments"] = fragment(out["ALPN"], 7)
	return out
}

func TestParseHelloSeesWhatCryptoTLSSees(t *testing.T) {
	for name, b := range hellos(t) {
		t.Run(name, func(t *testing.T) {
			h, _, err := parseHello(b)
			require.NoError(t, err)
			want, alpn, ok := oracle(b)
			require.True(t, ok)
			require.Equal(t, strings.ToLower(want), h.name)
			require.Equal(t, alpn, h.alpn)
			for n := range b {
				_, need, err := parseHello(b[:n])
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
				require.Greater(t, need, n)
				require.LessOrEqual(t, need, len(b))
			}
			_, _, err = parseHello(append(slices.Clip(b), "more"...))
			require.NoError(t, err)
		})
	}
}

func TestParseHelloRefusesMalformedBytes(t *testing.T) {
	plain := clientHello(t, &tls.Config{ServerName: "host.example.com"})
	at := bytes.Index(plain, []byte("host.example.com"))
	with := func(i int, b byte) []byte {
		out := bytes.Clone(plain)
		out[i] = b
		return out
	}
	for name, b := range map[string][]byte{
		"another record":       with(0, 23),
		"another version":      with(1, 2),
		"another message":      with(5, 2),
		"too long":             with(6, 2),
		"a list too long":      with(at-4, plain[at-4]+1),
		"a name too short":     with(at-1, plain[at-1]-1),
		"another kind of name": with(at-3, 1),
		"two dots at the end":  bytes.Replace(plain, []byte("example.com"), []byte("example.c.."), 1),
		"a zero in the name":   with(at+3, 0),
		"no host":              with(at+4, ':'),
		"a thousand records":   fragment(clientHello(t, &tls.Config{ServerName: "a.b", NextProtos: make([]string, 0)}), 1),
	} {
		_, _, err := parseHello(b)
		if name == "a thousand records" && len(b) <= maxRecords*6 {
			require.NoError(t, err)
			continue
		}
		require.ErrorIs(t, err, errHello, name)
	}
}

func TestTrailingDotOfServerNameIsIgnored(t *testing.T) {
	b := clientHello(t, &tls.Config{ServerName: "host.example.com1"})
	h, _, err := parseHello(bytes.Replace(b, []byte("com1"), []byte("COM."), 1))
	require.NoError(t, err)
	require.Equal(t, "host.example.com", h.name)
}

// echConfigs are of a server that hides its name behind another.
func echConfigs(t testing.TB, public string) []byte {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	require.NoError(t, err)
	var b cryptobyte.Builder
	b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
		b.AddUint16(extensionECH)
		b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) {
			b.AddUint8(1)
			b.AddUint16(0x20)
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes(key.PublicKey().Bytes()) })
			b.AddUint16LengthPrefixed(func(b *cryptobyte.Builder) { b.AddUint16(1); b.AddUint16(1) })
			b.AddUint8(32)
			b.AddUint8LengthPrefixed(func(b *cryptobyte.Builder) { b.AddBytes([]byte(public)) })
			b.AddUint16(0)
		})
	})
	return b.BytesOrPanic()
}

func TestServerNameWithECHIsIgnored(t *testing.T) {
	b := clientHello(t, &tls.Config{
		ServerName: "hidden.example.com", MinVersion: tls.VersionTLS13,
		EncryptedClientHelloConfigList: echConfigs(t, "public.example.com"),
	})
	require.Contains(t, string(b), "public.example.com")
	h, _, err := parseHello(b)
	require.NoError(t, err)
	require.Empty(t, h.name)
}

func FuzzParseHello(f *testing.F) {
	for _, b := range hellos(f) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, need, err := parseHello(b)
		switch {
		case errors.Is(err, io.ErrUnexpectedEOF):
			require.Greater(t, need, min(len(b), maxHello-1))
			return
		case err != nil:
			return
		}
		name, alpn, ok := oracle(b)
		if !ok {
			return
		}
		if h.name != "" {
			require.Equal(t, strings.ToLower(name), h.name)
		}
		require.Equal(t, alpn, h.alpn)
	})
}

func FuzzRecognise(f *testing.F) {
	for _, s := range []string{"GET / HTTP/1.1\r\n\r\n", "\r\nFOO x HTTP/1.1\n", preface, "SSH-2.0\r\n", "\x16\x03\x01", "EHLO x\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		k, h, need := recognise(b)
		require.Equal(t, k == speaksTLS, h != nil)
		if k == undecided {
			require.Greater(t, need, len(b))
			require.LessOrEqual(t, need, max(maxHello, len(b)+1))
			require.LessOrEqual(t, len(b), maxHello)
		} else { // whatever comes after
			more, _, _ := recognise(append(bytes.Clone(b), "x HTTP/1.1\r\n"...))
			if k != speaksOther {
				require.Equal(t, k, more)
			}
		}
	})
}

func FuzzAuthority(f *testing.F) {
	for _, s := range []string{"a", "A.b:80", "[::1]:8", "[fe80::1%25x]", "a:", "a.", "a:b:c", "1.2.3.4"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		host, port, ok := authority(s)
		if !ok {
			return
		}
		require.Equal(t, strings.ToLower(host), host)
		require.NotEmpty(t, host)
		u, err := url.Parse("http://" + s + "/")
		require.NoError(t, err, "others can read it too")
		if !strings.HasPrefix(s, "[") {
			require.Equal(t, strings.TrimSuffix(strings.ToLower(u.Hostname()), "."), host)
		}
		again, samePort, ok := authority(strings.ToUpper(s))
		require.True(t, ok)
		require.Equal(t, host, again)
		require.Equal(t, port, samePort)
	})
}

func FuzzUnambiguous(f *testing.F) {
	for _, s := range []string{"/a/b", "/a/../b", "/%2e%2e/x", "/a%2Fb", "//a", "*", "/a;b", "/%252f"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		u, err := url.ParseRequestURI(raw)
		if err != nil || u.Host != "" {
			return
		}
		cut, _, _ := strings.Cut(raw, "?")
		if !unambiguous(cut, u.Path) || u.Path == "*" {
			return
		}
		require.Equal(t, u.Path, strings.ReplaceAll(u.Path, "//", "/"))
		require.NotContains(t, strings.Split(u.Path, "/"), "..")
		resolved := (&url.URL{Path: "/"}).ResolveReference(&url.URL{Path: u.Path})
		require.Equal(t, u.Path, resolved.Path, "nothing to resolve")
	})
}
