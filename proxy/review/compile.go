package review

import (
	"crypto/x509"
	"fmt"
	"net/netip"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/certificates"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

// Compile returns the routes of the reviews that arrive at a pod of a shard.
func Compile(m *meshv1.Webhook, shard string) (*Routes, error) {
	division, err := isolation.Compile(&meshv1.Sharding{Limits: m.GetLimits(), Shared: m.GetShared(), Key: m.GetKey()}, "")
	if err != nil {
		return nil, fmt.Errorf("routes of reviews: %w", err)
	}
	out := &Routes{
		Routes: route.Routes{
			Shard: shard, Default: m.GetDefaultShard(), ByUID: m.GetKey() == meshv1.Key_KEY_OBJECT,
			Shared: func(h route.Head) bool {
				return division.EveryoneWrites(h.Resource.GroupResource(), h.Key(), h.Name)
			},
			Limited: func(h route.Head) bool {
				within, limited := division.Scope(h.Resource.GroupResource())
				return !limited || h.Key() == "" || within.Owns(h.Key())
			},
		},
		Pods: map[string][]netip.Addr{}, Authorities: map[string]*x509.CertPool{},
	}
	for _, o := range m.GetOwners() {
		scope, err := sharding.FromProto(o.GetScope())
		if err != nil {
			return nil, fmt.Errorf("routes of reviews: shard %s: %w", o.GetShard(), err)
		}
		out.Owners = append(out.Owners, route.Owner{Shard: o.GetShard(), Scope: scope})
	}
	for _, r := range m.GetReady() {
		for _, text := range r.GetAddresses() {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return nil, fmt.Errorf("routes of reviews: shard %s: %w", r.GetShard(), err)
			}
			out.Pods[r.GetShard()] = append(out.Pods[r.GetShard()], a)
		}
	}
	for _, a := range m.GetAuthorities() {
		if pool := certificates.Pool(a.GetCa()); pool != nil { // else its reviews are answered by the pod that is asked
			out.Authorities[a.GetServerName()] = pool
		}
	}
	return out, nil
}
