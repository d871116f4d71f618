package upstream

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// ServerName is the name that the apiserver's certificate must be valid for, at any address.
const ServerName = "kubernetes.default.svc"

const (
	connectTimeout   = 10 * time.Second // all addresses and the handshake together
	attemptTimeout   = 3 * time.Second  // one address, except the last
	protocolHTTP11   = "http/1.1"
	protocolHTTP2    = "h2"
	sessionCacheSize = 4
	sendBuffer       = 256 << 10
	unanswered       = 45 * time.Second // as long as keep-alives take to detect a lost peer
)

// Dial connects from the pod's network namespace.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// Cluster has the addresses of the apiserver and the CA that verifies it. It is immutable.
type Cluster struct {
	addresses []string // that are dialed
	others    []string // that clients reach it by, too
	ca        []byte
	roots     *x509.CertPool
}

// NewCluster returns the cluster of m, which must have a CA and at least one address. All
// addresses must be literal IPs with ports.
func NewCluster(m *meshv1.Cluster) (*Cluster, error) {
	c := &Cluster{ca: m.GetCa(), roots: x509.NewCertPool()}
	for _, addr := range slices.Concat(m.GetServiceAddresses(), m.GetEndpointAddresses()) {
		if _, err := netip.ParseAddrPort(addr); err != nil {
			return nil, fmt.Errorf("cluster: address %q is not a literal IP and port", addr)
		}
		if !slices.Contains(c.addresses, addr) {
			c.addresses = append(c.addresses, addr)
		}
	}
	c.others = m.GetAdditionalAddresses()
	if len(c.addresses) == 0 {
		return nil, errors.New("cluster: no address of the apiserver")
	}
	if !c.roots.AppendCertsFromPEM(c.ca) {
		return nil, errors.New("cluster: no certificate in the CA")
	}
	return c, nil
}

// Equal reports whether c is the same as o.
func (c *Cluster) Equal(o *Cluster) bool {
	return o != nil && slices.Equal(c.addresses, o.addresses) && slices.Equal(c.others, o.others) && string(c.ca) == string(o.ca)
}

// Has reports whether an address is the apiserver's.
func (c *Cluster) Has(addr netip.AddrPort) bool {
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	return slices.ContainsFunc(slices.Concat(c.addresses, c.others), func(s string) bool {
		own, err := netip.ParseAddrPort(s)
		return err == nil && netip.AddrPortFrom(own.Addr().Unmap(), own.Port()) == addr
	})
}

// open returns a TCP connection to the apiserver.
func (c *Cluster) open(ctx context.Context, dial Dial) (net.Conn, error) {
	raw, err := c.dial(ctx, dial)
	if err != nil {
		return nil, err
	}
	// A silent watch must detect that its peer is gone.
	if k, ok := raw.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
	}); ok {
		_ = k.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 20 * time.Second, Interval: 5 * time.Second, Count: 5})
	}
	// By default the kernel's buffer grows to megabytes for a peer that does not read.
	if b, ok := raw.(interface{ SetWriteBuffer(int) error }); ok {
		_ = b.SetWriteBuffer(sendBuffer)
	}
	return raw, nil
}

func (c *Cluster) dial(ctx context.Context, dial Dial) (net.Conn, error) {
	var errs []error
	for i, addr := range c.addresses {
		attempt, cancel := ctx, context.CancelFunc(func() {})
		if i < len(c.addresses)-1 {
			attempt, cancel = context.WithTimeout(ctx, attemptTimeout)
		}
		conn, err := dial(attempt, "tcp", addr)
		cancel()
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}
