package trust

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// ServingSecret is the Secret of the manager's own CA and certificate.
const ServingSecret = "ctrlmesh-manager-serving"

const servingLife = 90 * 24 * time.Hour

// Serving is the certificate that the manager's servers present, as stored in its Secret. Every
// replica reads it; only the leader renews it.
type Serving struct {
	// Client reads and writes Secrets, uncached.
	Client client.Client
	// Namespace of the Secret.
	Namespace string
	// Names of the manager's Services.
	Names Names
	// Now is the clock.
	Now func() time.Time

	current atomic.Pointer[servingState]
}

type servingState struct {
	ring *Ring
	cert *tls.Certificate
}

// Load reads the certificate, or creates it if there is none.
func (s *Serving) Load(ctx context.Context) error {
	_, err := s.load(ctx)
	return err
}

// Maintain loads the certificate on the leader, and renews it if that is due. published is the
// last published bundle that verifies the manager.
func (s *Serving) Maintain(ctx context.Context, published []byte) error {
	secret, err := s.load(ctx)
	if secret == nil {
		return err
	}
	f := s.facts()
	f.Bundled = published
	var ring *Ring
	if err != nil {
		ring, err = NewRing(f) // safe: the new CA is published
	} else {
		state := s.current.Load()
		if ring, err = state.ring.Step(f); ring == state.ring && !s.due(state) {
			return nil
		}
	}
	if err != nil {
		return err
	}
	if err := s.issue(ring, secret); err != nil {
		return err
	}
	if err := s.Client.Update(ctx, secret); err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", s.Namespace, ServingSecret, err)
	}
	return s.adopt(secret)
}

// facts returns the facts of a CA that no pod keeps: all clients of the manager read the bundle
// whenever it changes.
func (s *Serving) facts() Facts {
	return Facts{Now: s.Now(), Name: "manager CA", Names: s.Names, Pods: map[string]time.Time{}}
}

// Bundle returns the CA that verifies the manager; nil before Load.
func (s *Serving) Bundle() []byte {
	if state := s.current.Load(); state != nil {
		return state.ring.Bundle()
	}
	return nil
}

// TLSConfig returns a configuration that always serves the current certificate.
func (s *Serving) TLSConfig() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: s.GetCertificate}
}

// GetCertificate is for tls.Config.
func (s *Serving) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	state := s.current.Load()
	if state == nil {
		return nil, errors.New("no certificate yet")
	}
	return state.cert, nil
}

func (s *Serving) due(state *servingState) bool {
	leaf := state.cert.Leaf
	lacks := func(d string) bool { return !slices.Contains(leaf.DNSNames, d) }
	return slices.ContainsFunc(state.ring.signer.Usable(s.Names).DNS, lacks) || s.Now().After(renewal(leaf))
}

// load returns the Secret even if its content is invalid.
func (s *Serving) load(ctx context.Context) (*corev1.Secret, error) {
	secret, err := loadOrCreate(ctx, s.Client, s.Namespace, ServingSecret, func(secret *corev1.Secret) error {
		ring, err := NewRing(s.facts())
		if err != nil {
			return err
		}
		return s.issue(ring, secret)
	})
	if err != nil {
		return nil, err
	}
	return secret, failure.Wrap(s.adopt(secret), "the Secret %s/%s is damaged", s.Namespace, ServingSecret)
}

func (s *Serving) adopt(secret *corev1.Secret) error {
	ring, err := decodeRing(secret)
	if err != nil {
		return err
	}
	// Do not return tls.X509KeyPair's error: it might quote the key.
	cert, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return errors.New("tls.crt and tls.key are not a pair")
	}
	s.current.Store(&servingState{ring: ring, cert: &cert})
	return nil
}

// issue creates a leaf, and sets the whole content of the Secret.
func (s *Serving) issue(ring *Ring, into *corev1.Secret) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	leaf, err := ring.signer.sign(key.Public(), s.Names, servingLife, s.Now())
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := ring.encode(into); err != nil {
		return err
	}
	into.Data[corev1.TLSCertKey] = encodePEM("CERTIFICATE", leaf)
	into.Data[corev1.TLSPrivateKeyKey] = encodePEM("PRIVATE KEY", der)
	return nil
}
