package downstream

import (
	"bytes"
	"log"
	"slices"
)

// distrust are the alerts of clients that do not trust a certificate, as crypto/tls describes them.
// Clients differ in which they send.
var distrust = map[byte][]byte{
	42: []byte("remote error: tls: bad certificate"),
	46: []byte("remote error: tls: unknown certificate"),
	48: []byte("remote error: tls: unknown certificate authority"),
}

// handshakes finds the TLS handshakes that clients end because they do not trust the certificate.
// net/http says so in its log alone.
type handshakes struct {
	next       *log.Logger
	distrusted func()
}

// watchHandshakes returns a log for an http.Server that calls distrusted for each client that does
// not trust its certificate, and passes everything on to next.
func watchHandshakes(next *log.Logger, distrusted func()) *log.Logger {
	return log.New(handshakes{next, distrusted}, "", 0)
}

// Write implements io.Writer, for a line of the log.
func (h handshakes) Write(line []byte) (int, error) {
	for _, alert := range distrust {
		if bytes.HasSuffix(bytes.TrimSpace(line), alert) {
			h.distrusted()
			break
		}
	}
	h.next.Print(string(line))
	return len(line), nil
}

// fatal are the record type, the version, the length and the level of a fatal alert.
var fatal = []byte{21, 3, 3, 0, 2, 2}

// plainDistrust reports whether bytes of a client end in such an alert. OpenSSL sends it in plain
// text where TLS 1.3 has begun to encrypt, so that crypto/tls takes it for a broken record.
func plainDistrust(b []byte) bool {
	at := len(b) - len(fatal) - 1
	if at < 0 || !slices.Equal(b[at:len(b)-1], fatal) {
		return false
	}
	_, is := distrust[b[len(b)-1]]
	return is
}
