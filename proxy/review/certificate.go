package review

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// certificate is the certificate of the application.
type certificate struct {
	mu    sync.Mutex
	known []*tls.Certificate // the last ones of the directory, the current one first
	shown []byte             // the leaf that the application presented last
	other bool               // the application presented another certificate when it was probed last
	unfit error              // why the application's connections cannot be terminated
	since time.Time          // when connections could be terminated first; zero: they cannot
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
	defer c.note()
	c.known = slices.DeleteFunc(c.known, func(k *tls.Certificate) bool { return bytes.Equal(k.Certificate[0], pair.Certificate[0]) })
	c.known = slices.Insert(c.known, 0, pair)
	c.known = c.known[:min(len(c.known), maxKnown)]
}

// forget forgets all that is known.
func (c *certificate) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known, c.shown, c.other, c.unfit = nil, nil, false, nil
	c.note()
}

// get returns what the application presents: it may read its directory later than the agent.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) == 0 {
		return nil, errNone
	}
	if k := c.find(c.shown); k != nil {
		return k, nil
	}
	return c.known[0], nil
}

// find returns, with mu locked, the known certificate with a leaf; nil if there is none.
func (c *certificate) find(leaf []byte) *tls.Certificate {
	for _, k := range c.known {
		if bytes.Equal(k.Certificate[0], leaf) {
			return k
		}
	}
	return nil
}

// usableSince returns since when connections can be terminated, and whether they can.
func (c *certificate) usableSince() (since time.Time, usable bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.since, !c.since.IsZero()
}

// note notes, with mu locked, since when connections can be terminated.
func (c *certificate) note() {
	switch usable := len(c.known) > 0 && c.unfit == nil; {
	case !usable:
		c.since = time.Time{}
	case c.since.IsZero():
		c.since = time.Now()
	}
}

// judge records what the application presented. It returns why its connections cannot be
// terminated. As long as they could, another certificate counts only if it is presented twice in
// succession: the application may have read its directory after a change, and the agent before.
func (c *certificate) judge(leaf []byte, mutual bool) (why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.note()
	again := c.other
	c.other = false
	switch {
	case mutual:
		why = errMutual
	case c.find(leaf) == nil:
		if why, c.other = errOther, true; !again && !c.since.IsZero() {
			return why
		}
	default:
		c.shown = leaf
	}
	c.unfit = why
	return why
}

// Probe connects to the application at an address of the pod. It returns nil if its
// connections can be terminated from now on, and why they are passed unread otherwise. If it
// presents another certificate than before, that begins with the second probe: read its directory
// before. ok is false if the application did not answer: then nothing changes.
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
	var leaf []byte
	if presented := conn.ConnectionState().PeerCertificates; len(presented) > 0 {
		leaf = presented[0].Raw
	}
	return s.certificate.judge(leaf, mutual), true
}
