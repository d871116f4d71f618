package trust

import (
	"crypto/x509"
	"net/netip"
	"slices"
)

// Names are what a certificate may speak for.
type Names struct {
	DNS []string
	IPs []netip.Addr
}

// APIServerNames are the names of the apiserver's Service, and its addresses.
func APIServerNames(clusterDomain string, addresses ...netip.Addr) Names {
	return Names{DNS: serviceNames("kubernetes", "default", clusterDomain), IPs: addresses}.sorted()
}

// ManagerNames are the names of the manager's Services.
func ManagerNames(namespace, clusterDomain string, services ...string) Names {
	var n Names
	for _, s := range services {
		// Never the bare name: it would be another Service in another namespace.
		n.DNS = append(n.DNS, serviceNames(s, namespace, clusterDomain)[1:]...)
	}
	return n.sorted()
}

func serviceNames(service, namespace, clusterDomain string) []string {
	qualified := service + "." + namespace
	return []string{service, qualified, qualified + ".svc", qualified + ".svc." + clusterDomain}
}

// since adds what a former certificate permits, the newest first: control planes
// that take turns need a new one for each name once, not at each turn.
func (n Names) since(former *x509.Certificate) Names {
	out := Names{DNS: slices.Clone(n.DNS), IPs: slices.Clone(n.IPs)}
	for _, d := range former.PermittedDNSDomains {
		if !slices.Contains(out.DNS, d) {
			out.DNS = append(out.DNS, d)
		}
	}
	for _, r := range former.PermittedIPRanges {
		ip, _ := netip.AddrFromSlice(r.IP)
		if ip = ip.Unmap(); len(out.IPs) < maxAddresses && !slices.Contains(out.IPs, ip) {
			out.IPs = append(out.IPs, ip)
		}
	}
	return out
}

func (n Names) sorted() Names {
	ips := make([]netip.Addr, len(n.IPs))
	for i, ip := range n.IPs {
		ips[i] = ip.Unmap()
	}
	slices.SortFunc(ips, netip.Addr.Compare)
	dns := slices.Sorted(slices.Values(n.DNS))
	return Names{DNS: slices.Compact(dns), IPs: slices.Compact(ips)}
}
