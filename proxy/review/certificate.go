package review

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"sync"
)

// certificate is the certificate of the application.
type certificate struct {
	mu    sync.Mutex
	known []*tls.Certificate // the last ones, the current one first
	unfit error              // why the application's connections cannot be terminated
}

// maxKnown is how many certificates are known: the application may present the one before.
const maxKnown = 3

var (
	errNone  = errors.New("the certificate of the webhook is not known")
	errOther = errors.New("the webhook presents another certificate than the one in spec.webhook.certDir: set certDir to the directory that it reads")
	// errMutual cannot be helped: the mesh has no credentials of the apiserver.
	errMutual = errors.New("the webhook asks its clients for certificates, which cannot be forwarded")
)

func (c *certificate) set(pair *tls.Certificate) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) > 0 && bytes.Equal(c.known[0].Certificate[0], pair.Certificate[0]) {
		c.known[0] = pair
		return
	}
	c.known = append([]*tls.Certificate{pair}, c.known...)
	c.known = c.known[:min(len(c.known), maxKnown)]
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) == 0 {
		return nil, errNone
	}
	return c.known[0], nil
}

// usable reports whether connections can be terminated.
func (c *certificate) usable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.known) > 0 && c.unfit == nil
}

// has reports whether the application may present a leaf.
func (c *certificate) has(leaf []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.known {
		if bytes.Equal(k.Certificate[0], leaf) {
			return true
		}
	}
	return false
}

func (c *certificate) judge(unfit error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unfit = unfit
}

// Probe connects to the application at an address of the pod. It returns nil if its
// connections can be terminated from now on, and why they are passed unread otherwise. ok is
// false if the application did not answer: then nothing changes.
func (s *Server) Probe(ctx context.Context, at netip.AddrPort) (why error, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	raw, err := s.Dial(ctx, "tcp", at.String())
	if err != nil {
		return fmt.Errorf("connecting to the webhook: %w", err), false
	}
	defer func() { _ = raw.Close() }()
	mutual := false
	conn := tls.Client(raw, &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
		InsecureSkipVerify: true, //nolint:gosec // the leaf is compared below
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			mutual = true
			return &tls.Certificate{}, nil
		},
	})
	if err := conn.HandshakeContext(ctx); err != nil && !mutual {
		return fmt.Errorf("connecting to the webhook: %w", err), false
	}
	switch state := conn.ConnectionState(); {
	case mutual:
		why = errMutual
	case len(state.PeerCertificates) == 0 || !s.certificate.has(state.PeerCertificates[0].Raw):
		why = errOther
	}
	s.certificate.judge(why)
	return why, true
}
