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
)

// ServingSecret is the Secret of the manager's own CA and certificate.
const ServingSecret = "ctrlmesh-manager-serving"

const servingLife = 90 * 24 * time.Hour

// Serving is the certificate that the manager's servers present, as its Secret
// has it. Every replica reads it; the leader alone renews it.
type Serving struct {
	// Client reads and writes Secrets, uncached.
	Client client.Client
	// Namespace of the Secret.
	Namespace string
	// Names of the manager's Services.
	Names Names
	// Now is the clock; time.Now when nil.
	Now func() time.Time

	current atomic.Pointer[servingState]
}

type servingState struct {
	ca   *CA
	cert *tls.Certificate
}

// Load reads the certificate, or makes it where there is none.
func (s *Serving) Load(ctx context.Context) error {
	_, err := s.load(ctx)
	return err
}

// Maintain is Load for the leader: it renews what is due.
func (s *Serving) Maintain(ctx context.Context) error {
	secret, err := s.load(ctx)
	var ca *CA
	switch state := s.current.Load(); {
	case secret == nil:
		return err
	case err != nil:
		// Nobody loses by new ones: their CA is published anew.
		if ca, err = NewCA("ctrlmesh manager CA", s.Names, s.now()); err != nil {
			return err
		}
	case s.due(state):
		ca = state.ca.Prune(s.now())
		if ca.Stale(s.Names, s.now()) {
			if ca, err = ca.Reissue(s.Names, s.now()); err != nil {
				return err
			}
		}
	default:
		return nil
	}
	data, err := s.issue(ca)
	if err != nil {
		return err
	}
	secret.Data = data
	if err := s.Client.Update(ctx, secret); err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", s.Namespace, ServingSecret, err)
	}
	return s.adopt(data)
}

// Bundle is the CA that verifies the manager; nil before Load.
func (s *Serving) Bundle() []byte {
	state := s.current.Load()
	if state == nil {
		return nil
	}
	return state.ca.Bundle()
}

// TLSConfig serves the current certificate, whatever it is at the time.
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
	missing := slices.ContainsFunc(s.Names.DNS, func(d string) bool { return !slices.Contains(leaf.DNSNames, d) })
	return missing || s.now().After(renewal(leaf)) || state.ca.Stale(s.Names, s.now())
}

// load returns the Secret even when what is in it is of no use.
func (s *Serving) load(ctx context.Context) (*corev1.Secret, error) {
	secret, err := loadOrCreate(ctx, s.Client, s.Namespace, ServingSecret, func(secret *corev1.Secret) error {
		ca, err := NewCA("ctrlmesh manager CA", s.Names, s.now())
		if err != nil {
			return err
		}
		secret.Data, err = s.issue(ca)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := s.adopt(secret.Data); err != nil {
		return secret, fmt.Errorf("the Secret %s/%s is damaged: %w", s.Namespace, ServingSecret, err)
	}
	return secret, nil
}

func (s *Serving) adopt(data map[string][]byte) error {
	ca, err := decodeCA(signerPrefix, data)
	if err != nil {
		return err
	}
	// Not tls.X509KeyPair's error: it might quote what it was given.
	cert, err := tls.X509KeyPair(data[corev1.TLSCertKey], data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return errors.New("tls.crt and tls.key are not a pair")
	}
	s.current.Store(&servingState{ca: ca, cert: &cert})
	return nil
}

// issue makes a leaf and returns the whole content of the Secret.
func (s *Serving) issue(ca *CA) (map[string][]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	leaf, err := ca.sign(key.Public(), s.Names, servingLife, s.now())
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	data := map[string][]byte{
		corev1.TLSCertKey:       encodePEM("CERTIFICATE", leaf),
		corev1.TLSPrivateKeyKey: encodePEM("PRIVATE KEY", der),
	}
	return data, ca.encode(signerPrefix, data)
}

func (s *Serving) now() time.Time {
	if s.Now != nil {
		return s.Now()
	}
	return time.Now()
}
