package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// destinations are what is redirected for all pods.
type destinations struct {
	cluster    *meshv1.Cluster
	apiservers []netip.AddrPort
	agents     []netip.AddrPort
	redirected bool // the capture knows them
}

// setCluster replaces the addresses of the cluster.
func (n *Node) setCluster(c *meshv1.Cluster) error {
	apiservers, err := parseAddresses(c.GetServiceAddresses(), c.GetEndpointAddresses())
	if err != nil {
		return fmt.Errorf("apiserver address: %w", err)
	}
	if len(apiservers) == 0 {
		return errors.New("the manager named no apiserver address")
	}
	agents, err := parseAddresses(c.GetAgentAddresses())
	if err != nil {
		return fmt.Errorf("agent address: %w", err)
	}
	if err := n.Proxy.SetCluster(c); err != nil {
		return err
	}
	if n.cluster != nil && !sameLeaf(n.cluster, c) {
		n.RenewLeaf()
	}
	n.destinations = destinations{cluster: c, apiservers: apiservers, agents: agents}
	return n.saveCluster()
}

// saveCluster saves and redirects the addresses, while this agent serves.
func (n *Node) saveCluster() error {
	if n.phase != serving || n.cluster == nil {
		return nil
	}
	if err := n.Store.SaveCluster(n.cluster); err != nil {
		n.Logger.Error("keeping the apiserver's addresses for the next start", "error", err)
	}
	return n.redirect()
}

// redirect gives the capture the addresses to redirect, unless it has them.
func (n *Node) redirect() error {
	if n.redirected || n.cluster == nil || n.phase != serving {
		return nil
	}
	if err := n.Capture.SetDestinations(n.apiservers, n.agents); err != nil {
		return fmt.Errorf("redirecting to the apiserver's addresses: %w", err)
	}
	n.redirected = true
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
		slices.Equal(a.GetAgentAddresses(), b.GetAgentAddresses())
}
