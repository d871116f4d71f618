package trust

import (
	"crypto/x509"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Names are the DNS names and addresses that a certificate may be valid for.
type Names struct {
	DNS []string
	IPs []netip.Addr
}

// APIServerNames returns the names of the apiserver's Service, and others that clients reach
// it by.
func APIServerNames(clusterDomain string, more Names) Names {
	return Names{DNS: append(serviceNames("kubernetes", "default", clusterDomain), more.DNS...), IPs: more.IPs}.sorted()
}

// ManagerNames returns the names of the manager's Services.
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

// HostName is a host, as a client names it, that a certificate can speak for: a
// DNS name without wildcards, or a literal address.
func HostName(host string) (Names, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip = ip.Unmap(); ip.Zone() != "" || ip.IsUnspecified() || ip.IsMulticast() {
			return Names{}, errors.New("the address is not that of a host")
		}
		return Names{IPs: []netip.Addr{ip}}, nil
	}
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	// Underscores are in no host's name by the letter, and in many in fact.
	// Clients read what ends in a number as an address, each in its own way.
	last := name[strings.LastIndexByte(name, '.')+1:]
	if len(validation.IsDNS1123Subdomain(strings.ReplaceAll(name, "_", "-"))) > 0 || last[0] >= '0' && last[0] <= '9' {
		return Names{}, errors.New("the host is neither a DNS name nor a literal address")
	}
	return Names{DNS: []string{name}}, nil
}

// permit lets a certificate sign for nothing but names.
func (n Names) permit(c *x509.Certificate) {
	c.PermittedDNSDomains, c.PermittedIPRanges = n.DNS, n.ranges()
	if len(n.IPs) == 0 {
		// No constraint would permit all.
		c.ExcludedIPRanges = []*net.IPNet{
			{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
			{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		}
	}
}

// exclude lets a certificate sign for anything but names.
func (n Names) exclude(c *x509.Certificate) {
	c.ExcludedDNSDomains, c.ExcludedIPRanges = n.DNS, n.ranges()
}

func (n Names) ranges() []*net.IPNet {
	return collect.Map(n.IPs, func(ip netip.Addr) *net.IPNet {
		return &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())}
	})
}

// excluding distinguishes the egress CA's certificates from the others, which all permit
// some DNS name.
func excluding(c *x509.Certificate) bool { return len(c.PermittedDNSDomains) == 0 }

// boundsOf are the names that a certificate permits or, if it is the egress CA's,
// excludes.
func boundsOf(c *x509.Certificate) Names {
	n, ranges := Names{DNS: c.PermittedDNSDomains}, c.PermittedIPRanges
	if excluding(c) {
		n.DNS, ranges = c.ExcludedDNSDomains, c.ExcludedIPRanges
	}
	for _, r := range ranges {
		if ip, ok := netip.AddrFromSlice(r.IP); ok {
			n.IPs = append(n.IPs, ip.Unmap())
		}
	}
	return n
}

func permitsDNS(c *x509.Certificate, name string) bool {
	if excluding(c) {
		return !slices.ContainsFunc(c.ExcludedDNSDomains, func(d string) bool { return name == d || strings.HasSuffix(name, "."+d) })
	}
	return slices.Contains(c.PermittedDNSDomains, name)
}

func permitsIP(c *x509.Certificate, ip netip.Addr) bool {
	return slices.Contains(boundsOf(c).IPs, ip.Unmap()) != excluding(c)
}

// since adds what a former certificate is bound by, the newest first: control planes
// that take turns need a new one for each name once, not at each turn.
func (n Names) since(former *x509.Certificate) Names {
	bounds := boundsOf(former)
	dns := collect.Filter(bounds.DNS, func(d string) bool { return !slices.Contains(n.DNS, d) })
	ips := collect.Filter(bounds.IPs, func(ip netip.Addr) bool { return !slices.Contains(n.IPs, ip) })
	return Names{DNS: slices.Concat(n.DNS, dns), IPs: slices.Concat(n.IPs, ips[:min(len(ips), max(maxAddresses-len(n.IPs), 0))])}
}

func (n Names) sorted() Names {
	ips := collect.Map(n.IPs, netip.Addr.Unmap)
	slices.SortFunc(ips, netip.Addr.Compare)
	dns := slices.Sorted(slices.Values(n.DNS))
	return Names{DNS: slices.Compact(dns), IPs: slices.Compact(ips)}
}
