package trust

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
)

// Authorities are all that a replica signs and serves with.
type Authorities struct {
	// Mesh is the CA of agents' leaves, Egress that of the hosts which the mesh answers for.
	Mesh, Egress *Authority
	// Serving is the manager's own certificate.
	Serving *Serving
}

// Load reads the CAs that pods trust.
func (a *Authorities) Load(ctx context.Context) error {
	return errors.Join(a.Mesh.Load(ctx), a.Egress.Load(ctx))
}

// Ready reports an error until all is loaded.
func (a *Authorities) Ready() error {
	if len(a.Mesh.Bundle()) == 0 || len(a.Egress.Bundle()) == 0 || len(a.Serving.Bundle()) == 0 {
		return errors.New("certificates are not loaded")
	}
	return nil
}

// Permits reports whether agents' certificates may name an address. A replica whose CA
// does not permit it reads the CA again.
func (a *Authorities) Permits(ctx context.Context, ip netip.Addr, log *slog.Logger) bool {
	if a.Mesh.Permits(ip) {
		return true
	}
	if err := a.Mesh.Load(ctx); err != nil {
		log.Warn("certificates could not be read again", "error", err)
	}
	return a.Mesh.Permits(ip)
}
