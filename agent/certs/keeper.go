// Package certs keeps the agent's certificates: the one with which it serves the clients
// of the apiserver, and those for other hosts. The manager signs them. They are renewed
// at two thirds of their lifetime.
package certs

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
	"math"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// SignFunc signs the public key of a PKCS #10 request (DER) and returns a DER
// chain, leaf first.
type SignFunc func(ctx context.Context, csr []byte) ([][]byte, error)

// Keeper keeps one certificate current. The key never leaves the node. It is kept in a
// directory that should be in memory (a tmpfs), so that an agent that starts while no
// manager answers can still serve.
type Keeper struct {
	dir     string
	sign    SignFunc
	logger  *slog.Logger
	current atomic.Pointer[tls.Certificate]
	renew   chan struct{}
	kept    bool // current is from an earlier agent; only Run uses it
}

const file = "leaf.pem"

// NewKeeper returns a Keeper with the certificate kept in dir, if it is still valid.
func NewKeeper(dir string, sign SignFunc, logger *slog.Logger) (*Keeper, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("creating the certificate directory: %w", err)
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

// ErrNone means that there is no certificate yet.
var ErrNone = errors.New("no serving certificate yet: waiting for the manager to sign one")

// Current returns the certificate to serve with.
func (k *Keeper) Current() (*tls.Certificate, error) {
	c := k.current.Load()
	if c == nil {
		return nil, ErrNone
	}
	return c, nil
}

// Renew requests a new certificate now, because its names have changed.
func (k *Keeper) Renew() {
	select {
	case k.renew <- struct{}{}:
	default:
	}
}

// signBackoff paces requests to the manager, which answers the agents of all nodes.
var signBackoff = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Cap: 30 * time.Second, Steps: math.MaxInt}

// Run keeps the certificate current until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		timer := time.NewTimer(k.untilRenewal())
		select {
		case <-ctx.Done():
		case <-k.renew:
		case <-timer.C:
		}
		timer.Stop()
		k.refresh(ctx)
	}
}

// refresh replaces the certificate. It retries until it succeeds or ctx ends.
func (k *Keeper) refresh(ctx context.Context) {
	for backoff := signBackoff; ctx.Err() == nil; {
		callCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := k.fetch(callCtx)
		cancel()
		if err == nil {
			return
		}
		retry := backoff.Step()
		k.logger.Info("failed to renew the serving certificate", "error", err, "retry_in", retry)
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// untilRenewal returns the time until two thirds of the certificate's lifetime. The CA
// of a certificate from an earlier agent may not be trusted any more, because the mesh
// may have been reinstalled since. Such a certificate serves only until there is a new one.
func (k *Keeper) untilRenewal() time.Duration {
	c := k.current.Load()
	if c == nil || k.kept {
		return 0
	}
	return max(0, time.Until(renewal(c.Leaf)))
}

func (k *Keeper) fetch(ctx context.Context) error {
	key, csr, err := newRequest()
	if err != nil {
		return err
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
	if err := k.save(b); err != nil {
		k.logger.Error("failed to save the serving certificate for the next start", "error", err)
	}
	return nil
}

// newRequest returns a new key, and a certificate request (PKCS #10) for it.
func newRequest() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("creating a key: %w", err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	return key, csr, failure.Wrap(err, "creating a certificate request")
}

// renewal returns when to renew a certificate: at two thirds of its lifetime.
func renewal(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) * 2 / 3)
}

// save replaces the file that the next agent reads.
func (k *Keeper) save(b []byte) error {
	tmp := filepath.Join(k.dir, "."+file)
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(k.dir, file))
}
