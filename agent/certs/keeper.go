// Package leaf keeps the agent's certificates: the one with which it serves the
// apiserver's clients, and those for other hosts. It asks the manager for them,
// renews them at two thirds of their life, and hands them to TLS handshakes.
package leaf

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
)

// SignFunc signs the public key of a PKCS #10 request (DER) and returns a DER
// chain, leaf first.
type SignFunc func(ctx context.Context, csr []byte) ([][]byte, error)

// Keeper keeps one certificate current. The key never leaves the node: it is
// kept in a directory that should be in memory (a tmpfs), so that an agent that
// starts while no manager answers can still serve.
type Keeper struct {
	dir     string
	sign    SignFunc
	logger  *slog.Logger
	current atomic.Pointer[tls.Certificate]
	renew   chan struct{}
	kept    bool // current is from an earlier agent; Run's alone
}

const file = "leaf.pem"

// NewKeeper returns a Keeper with the certificate kept in dir, if it is still valid.
func NewKeeper(dir string, sign SignFunc, logger *slog.Logger) (*Keeper, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the certificate directory: %w", err)
	}
	k := &Keeper{dir: dir, sign: sign, logger: logger, renew: make(chan struct{}, 1)}
	if b, err := os.ReadFile(filepath.Join(dir, file)); err == nil {
		cert, err := tls.X509KeyPair(b, b)
		if err == nil && cert.Leaf != nil && time.Now().Before(cert.Leaf.NotAfter) {
			k.current.Store(&cert)
			k.kept = true
		}
	}
	return k, nil
}

// ErrNone says that there is no certificate yet.
var ErrNone = errors.New("no serving certificate yet: waiting for the manager to sign one")

// Current returns the certificate to serve with.
func (k *Keeper) Current() (*tls.Certificate, error) {
	c := k.current.Load()
	if c == nil {
		return nil, ErrNone
	}
	return c, nil
}

// Renew asks for a new certificate now, because what it must say has changed.
func (k *Keeper) Renew() {
	select {
	case k.renew <- struct{}{}:
	default:
	}
}

// Run keeps the certificate current until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	retry := 100 * time.Millisecond
	for ctx.Err() == nil {
		timer := time.NewTimer(k.untilRenewal())
		select {
		case <-ctx.Done():
		case <-k.renew:
		case <-timer.C:
		}
		timer.Stop()
		for ctx.Err() == nil {
			callCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
			err := k.fetch(callCtx)
			cancel()
			if err == nil {
				retry = 100 * time.Millisecond
				break
			}
			k.logger.Info("no new serving certificate", "error", err, "retry_in", retry)
			select {
			case <-ctx.Done():
			case <-time.After(retry):
			}
			retry = min(2*retry, 30*time.Second)
		}
	}
}

// untilRenewal is two thirds of the certificate's life from its beginning. One of
// an earlier agent may be of a CA that nobody trusts any more, for the mesh may have
// been removed and installed anew since: it serves only until there is a new one.
func (k *Keeper) untilRenewal() time.Duration {
	c := k.current.Load()
	if c == nil || k.kept {
		return 0
	}
	life := c.Leaf.NotAfter.Sub(c.Leaf.NotBefore)
	return max(0, time.Until(c.Leaf.NotBefore.Add(life*2/3)))
}

func (k *Keeper) fetch(ctx context.Context) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making a key: %w", err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return fmt.Errorf("making a certificate request: %w", err)
	}
	chain, err := k.sign(ctx, csr)
	if err != nil {
		return err
	}
	if len(chain) == 0 {
		return errors.New("the manager answered without a certificate")
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the key: %w", err)
	}
	var b []byte
	for _, c := range chain {
		b = append(b, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c})...)
	}
	b = append(b, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})...)
	cert, err := tls.X509KeyPair(b, b)
	if err != nil {
		return fmt.Errorf("using the signed certificate: %w", err)
	}
	k.current.Store(&cert)
	k.kept = false
	k.logger.Info("new serving certificate", "not_after", cert.Leaf.NotAfter)
	tmp := filepath.Join(k.dir, "."+file)
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		k.logger.Error("keeping the serving certificate for the next start", "error", err)
		return nil
	}
	if err := os.Rename(tmp, filepath.Join(k.dir, file)); err != nil {
		k.logger.Error("keeping the serving certificate for the next start", "error", err)
	}
	return nil
}
