package leaf

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	"k8s.io/utils/lru"
)

const (
	// maxHosts bounds the certificates that are kept.
	maxHosts = 1024
	// maxHost bounds a host's name.
	maxHost = 253
	// refusedFor is how long an error is the answer, so that a client that tries
	// again and again asks nobody.
	refusedFor = 5 * time.Second
	// askFor is how long a handshake may wait for the manager.
	askFor = 5 * time.Second
	// askRate and askBurst bound what one pod asks, to a part of what the manager signs
	// for a node. They bound as well how fast one pod's names push out those of others.
	askRate, askBurst = 0.25, 50
)

// SignHostFunc is SignFunc for another host than the apiserver.
type SignHostFunc func(ctx context.Context, csr []byte, host string) ([][]byte, error)

// Hosts are certificates for other hosts, asked of the manager when they are first
// needed. The key is in memory alone: an agent that starts asks anew.
type Hosts struct {
	sign SignHostFunc
	key  *ecdsa.PrivateKey
	csr  []byte
	kept *lru.Cache // *hostLeaf by host, whichever pod asked for it
	// turn is had by the one that asks the manager, which takes few calls at a time.
	turn chan struct{}
}

// PodHosts are Hosts for one pod, which has a budget: it chooses the names, and what it
// asks for beyond that it alone does not get.
type PodHosts struct {
	hosts *Hosts
	calls singleflight.Group
	asks  *rate.Limiter
	// turn is had by the one that waits for the turn of Hosts, so that pods take turns
	// however many names each waits for.
	turn chan struct{}
}

// hostLeaf is not changed once made.
type hostLeaf struct {
	cert *tls.Certificate // nil if there is none
	err  error            // of the last attempt
	// next is when to ask again.
	next time.Time
}

// NewHosts makes the key.
func NewHosts(sign SignHostFunc) (*Hosts, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("making a certificate request: %w", err)
	}
	return &Hosts{sign: sign, key: key, csr: csr, kept: lru.New(maxHosts), turn: make(chan struct{}, 1)}, nil
}

// Pod makes the Hosts of a pod.
func (h *Hosts) Pod() *PodHosts {
	return &PodHosts{hosts: h, asks: rate.NewLimiter(askRate, askBurst), turn: make(chan struct{}, 1)}
}

// Get returns a certificate for host. It waits for the manager only if there is
// none: one that is due is renewed beside the requests.
func (p *PodHosts) Get(ctx context.Context, host string) (*tls.Certificate, error) {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || len(host) > maxHost {
		return nil, errors.New("no certificate is signed for a host without a name, or with one so long")
	}
	now := time.Now()
	have := p.hosts.have(host)
	valid := have != nil && have.cert != nil && now.Before(have.cert.Leaf.NotAfter)
	switch {
	case have != nil && now.Before(have.next):
		if valid {
			return have.cert, nil
		}
		return nil, have.err
	case valid:
		p.ask(host)
		return have.cert, nil
	}
	select {
	case r := <-p.ask(host):
		if r.Err != nil {
			return nil, r.Err
		}
		leaf := r.Val.(*hostLeaf)
		if leaf.cert == nil {
			return nil, leaf.err
		}
		return leaf.cert, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (h *Hosts) have(host string) *hostLeaf {
	if v, ok := h.kept.Get(host); ok {
		return v.(*hostLeaf)
	}
	return nil
}

var (
	errBudget = errors.New("the pod asks for certificates for too many hosts")
	errQueue  = errors.New("too many hosts are waiting for a certificate")
)

// ask asks once for all that wait, and for as long as the one who waits longest.
func (p *PodHosts) ask(host string) <-chan singleflight.Result {
	return p.calls.DoChan(host, func() (any, error) {
		if !p.asks.Allow() {
			return nil, errBudget
		}
		ctx, cancel := context.WithTimeout(context.Background(), askFor)
		defer cancel()
		for _, turn := range []chan struct{}{p.turn, p.hosts.turn} {
			select {
			case turn <- struct{}{}:
				defer func() { <-turn }()
			case <-ctx.Done():
				return nil, errQueue
			}
		}
		return p.hosts.renew(ctx, host), nil
	})
}

// renew asks the manager, unless another pod did meanwhile.
func (h *Hosts) renew(ctx context.Context, host string) *hostLeaf {
	old := h.have(host)
	if old != nil && time.Now().Before(old.next) {
		return old
	}
	leaf := &hostLeaf{}
	if leaf.cert, leaf.err = h.fetch(ctx, host); leaf.err == nil {
		c := leaf.cert.Leaf
		leaf.next = c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) * 2 / 3)
	} else {
		leaf.next = time.Now().Add(refusedFor)
		if old != nil && old.cert != nil && time.Now().Before(old.cert.Leaf.NotAfter) {
			leaf.cert = old.cert
		}
	}
	h.kept.Add(host, leaf)
	return leaf
}

func (h *Hosts) fetch(ctx context.Context, host string) (*tls.Certificate, error) {
	chain, err := h.sign(ctx, h.csr, host)
	if err != nil {
		return nil, err
	}
	if len(chain) == 0 {
		return nil, errors.New("the manager answered without a certificate")
	}
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		return nil, fmt.Errorf("using the signed certificate: %w", err)
	}
	if !h.key.PublicKey.Equal(leaf.PublicKey) {
		return nil, errors.New("the manager answered with a certificate of another key")
	}
	return &tls.Certificate{Certificate: chain, PrivateKey: h.key, Leaf: leaf}, nil
}
