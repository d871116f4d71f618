package certs

import (
	"context"
	"crypto/ecdsa"
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
	// refusedFor is how long an error is cached, so that a client that retries does not
	// reach the manager.
	refusedFor = 5 * time.Second
	// askFor is how long a handshake may wait for the manager.
	askFor = 5 * time.Second
	// askRate (per second) and askBurst bound the requests of one pod to a part of what the
	// manager signs for a node. They also bound how fast one pod's names evict others.
	askRate, askBurst = 0.25, 50
)

// SignHostFunc is SignFunc for another host than the apiserver.
type SignHostFunc func(ctx context.Context, csr []byte, host string) ([][]byte, error)

// Hosts are certificates for hosts other than the apiserver. The manager signs them when
// they are first needed. The key is kept in memory only.
type Hosts struct {
	sign SignHostFunc
	key  *ecdsa.PrivateKey
	csr  []byte
	kept *lru.Cache // *hostLeaf by host, whichever pod asked for it
	// turn is a semaphore of one: the manager takes few calls at a time.
	turn chan struct{}
}

// PodHosts are Hosts for one pod. The pod chooses the names, so each pod has a budget of
// its own.
type PodHosts struct {
	hosts *Hosts
	calls singleflight.Group
	limit *rate.Limiter
	// turn is a semaphore of one that is taken before that of Hosts, so that pods alternate
	// however many names each waits for.
	turn chan struct{}
}

// hostLeaf is immutable.
type hostLeaf struct {
	cert *tls.Certificate // nil if there is none
	err  error            // of the last attempt
	// next is when to ask again.
	next time.Time
}

// NewHosts returns Hosts with a new key.
func NewHosts(sign SignHostFunc) (*Hosts, error) {
	key, csr, err := newRequest()
	if err != nil {
		return nil, err
	}
	return &Hosts{sign: sign, key: key, csr: csr, kept: lru.New(maxHosts), turn: make(chan struct{}, 1)}, nil
}

// Pod returns the Hosts of one pod.
func (h *Hosts) Pod() *PodHosts {
	return &PodHosts{hosts: h, limit: rate.NewLimiter(askRate, askBurst), turn: make(chan struct{}, 1)}
}

// Get returns a certificate for host. It waits for the manager only if there is none.
// A certificate that is due is renewed in the background.
func (p *PodHosts) Get(ctx context.Context, host string) (*tls.Certificate, error) {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || len(host) > maxHost {
		return nil, errors.New("no certificate is signed for a host without a name, or with one that is too long")
	}
	now := time.Now()
	have := p.hosts.cached(host)
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

func (h *Hosts) cached(host string) *hostLeaf {
	if v, ok := h.kept.Get(host); ok {
		return v.(*hostLeaf)
	}
	return nil
}

var (
	errBudget = errors.New("the pod asks for certificates for too many hosts")
	errQueue  = errors.New("too many hosts are waiting for a certificate")
)

// ask requests a certificate once for all callers that wait for the same host.
func (p *PodHosts) ask(host string) <-chan singleflight.Result {
	return p.calls.DoChan(host, func() (any, error) {
		if !p.limit.Allow() {
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

// renew asks the manager, unless another pod has done so in the meantime.
func (h *Hosts) renew(ctx context.Context, host string) *hostLeaf {
	old := h.cached(host)
	if old != nil && time.Now().Before(old.next) {
		return old
	}
	leaf := &hostLeaf{}
	if leaf.cert, leaf.err = h.fetch(ctx, host); leaf.err == nil {
		leaf.next = renewal(leaf.cert.Leaf)
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
