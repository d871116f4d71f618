package proxy

import (
	"errors"
	"net"

	"github.com/ctrlmesh/ctrlmesh/proxy/egress"
)

// ServeEgress accepts the pod's redirected connections to other hosts on l, which it
// closes. They are egress.Conns. It returns nil after Drain or Shutdown began, and may
// be called for several listeners.
func (p *Pod) ServeEgress(l net.Listener) error {
	defer func() { _ = l.Close() }()
	var _ egress.Conn
	return errors.New("egress is not served yet")
}
