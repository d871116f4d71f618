package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// destinations are the addresses that are redirected for all pods.
type destinations struct {
	*core
	cluster    *meshv1.Cluster
	apiservers []netip.AddrPort
	agents     []netip.AddrPort
	redirected bool // the capture knows them
}

// set replaces the addresses of the cluster.
func (d *destinations) set(c *meshv1.Cluster) error {
	apiservers, err := parseAddresses(c.GetServiceAddresses(), c.GetEndpointAddresses(), c.GetAdditionalAddresses())
	if err != nil {
		return fmt.Errorf("parsing the apiserver's addresses: %w", err)
	}
	if len(apiservers) == 0 {
		return errors.New("the manager named no address of the apiserver")
	}
	agents, err := parseAddresses(c.GetAgentAddresses())
	if err != nil {
		return fmt.Errorf("parsing the agents' addresses: %w", err)
	}
	if err := d.Proxy.SetCluster(c); err != nil {
		return err
	}
	if d.cluster != nil && !sameLeaf(d.cluster, c) {
		d.RenewLeaf()
	}
	d.cluster, d.apiservers, d.agents, d.redirected = c, apiservers, agents, false
	return d.save()
}

// save saves and redirects the addresses, while this agent serves.
func (d *destinations) save() error {
	if d.phase != serving || d.cluster == nil {
		return nil
	}
	d.logError(d.Store.SaveCluster(d.cluster), "failed to save the apiserver's addresses for the next start", nil)
	return d.redirect()
}

// redirect gives the capture the addresses to redirect, unless it has them.
func (d *destinations) redirect() error {
	if d.redirected || d.cluster == nil || d.phase != serving {
		return nil
	}
	if err := d.Capture.SetDestinations(d.apiservers, d.agents); err != nil {
		return fmt.Errorf("redirecting the apiserver's addresses: %w", err)
	}
	d.redirected = true
	return nil
}

func parseAddresses(lists ...[]string) ([]netip.AddrPort, error) {
	var parsed []netip.AddrPort
	for _, s := range slices.Concat(lists...) {
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, a)
	}
	return parsed, nil
}

// sameLeaf reports whether a serving certificate that was signed under a is valid under b.
func sameLeaf(a, b *meshv1.Cluster) bool {
	return a.GetMeshCa() == b.GetMeshCa() &&
		slices.Equal(a.GetServiceAddresses(), b.GetServiceAddresses()) &&
		slices.Equal(a.GetEndpointAddresses(), b.GetEndpointAddresses()) &&
		slices.Equal(a.GetAgentAddresses(), b.GetAgentAddresses()) &&
		slices.Equal(a.GetAdditionalHosts(), b.GetAdditionalHosts())
}
