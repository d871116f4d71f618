// Package apiserver says where the real apiserver is: the address of its
// Service, the endpoints behind it, and the CA that verifies it; and where agents
// stand in for it. Pure.
package apiserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Namespace and Name of the apiserver's Service.
const (
	Namespace = "default"
	Name      = "kubernetes"
	port      = "https"

	// AgentService is the name of the agents' Service, in the mesh's namespace.
	AgentService = "ctrlmesh-agent"
)

// Additional is where else clients reach the apiserver.
type Additional struct {
	// Hosts as clients name them: DNS names and literal addresses.
	Hosts []string
	// At is where these are, as far as they have resolved.
	At []netip.AddrPort
}

// Equal reports whether two say the same.
func (a *Additional) Equal(o *Additional) bool {
	return slices.Equal(a.Hosts, o.Hosts) && slices.Equal(a.At, o.At)
}

// Cluster is what agents are sent about the apiserver, whose CA is ca, of their own
// Service, nil where there is none, and of the mesh's CA certificates.
func Cluster(service, agents *corev1.Service, parts []discoveryv1.EndpointSlice, more Additional, ca, meshCA []byte) (*meshv1.Cluster, error) {
	var endpoints []netip.AddrPort
	services := Services(service)
	if len(services) == 0 {
		return nil, fmt.Errorf("the Service %s/%s has no address for its port %q", Namespace, Name, port)
	}
	if len(ca) == 0 {
		return nil, errors.New("no CA for the apiserver is known")
	}
	for _, s := range parts {
		for _, p := range s.Ports {
			if p.Name == nil || *p.Name != port || p.Port == nil {
				continue
			}
			for _, e := range s.Endpoints {
				endpoints = append(endpoints, addresses(e.Addresses, *p.Port)...)
			}
		}
	}
	// The order of the Service's addresses is its preference; that of endpoints means nothing.
	slices.SortFunc(endpoints, netip.AddrPort.Compare)
	c := &meshv1.Cluster{
		ServiceAddresses:  literals(services),
		EndpointAddresses: literals(slices.Compact(endpoints)),
		AgentAddresses:    literals(Agents(agents)),
		Ca:                ca,

		AdditionalHosts:     more.Hosts,
		AdditionalAddresses: literals(more.At),
	}
	if len(meshCA) > 0 {
		c.MeshCa = fingerprint(meshCA)
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(c)
	if err != nil {
		return nil, err
	}
	c.Version = fingerprint(b)
	return c, nil
}

// Services are the addresses of the apiserver's Service, the preferred first.
func Services(service *corev1.Service) (out []netip.AddrPort) {
	for _, p := range service.Spec.Ports {
		if p.Name == port {
			out = append(out, addresses(service.Spec.ClusterIPs, p.Port)...)
		}
	}
	return out
}

func fingerprint(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:8])
}

// Agents are the addresses of the agents' Service, the preferred first.
func Agents(service *corev1.Service) []netip.AddrPort {
	if service == nil || len(service.Spec.Ports) == 0 {
		return nil
	}
	return addresses(service.Spec.ClusterIPs, service.Spec.Ports[0].Port)
}

func addresses(ips []string, port int32) (out []netip.AddrPort) {
	for _, ip := range ips {
		if addr, err := netip.ParseAddr(ip); err == nil {
			out = append(out, netip.AddrPortFrom(addr.Unmap(), uint16(port)))
		}
	}
	return out
}

// Hosts are what clients may name the apiserver of a Cluster by, beside its Service's names: the
// addresses that agents speak for, and DNS names.
func Hosts(c *meshv1.Cluster) (names []string, addresses []netip.Addr) {
	for _, s := range slices.Concat(c.GetServiceAddresses(), c.GetEndpointAddresses(), c.GetAgentAddresses()) {
		if ap, err := netip.ParseAddrPort(s); err == nil {
			addresses = append(addresses, ap.Addr())
		}
	}
	for _, host := range c.GetAdditionalHosts() {
		if ip, err := netip.ParseAddr(host); err == nil {
			addresses = append(addresses, ip)
		} else {
			names = append(names, host)
		}
	}
	return names, addresses
}

func literals(in []netip.AddrPort) []string { return collect.Map(in, netip.AddrPort.String) }

// Read returns what agents must know of the apiserver and of each other. namespace is the
// mesh's; ca verifies the apiserver, meshCA the agents.
func Read(ctx context.Context, from client.Reader, namespace string, more Additional, ca, meshCA []byte) (*meshv1.Cluster, error) {
	var service corev1.Service
	var parts discoveryv1.EndpointSliceList
	agents := &corev1.Service{}
	err := from.Get(ctx, types.NamespacedName{Namespace: namespace, Name: AgentService}, agents)
	if apierrors.IsNotFound(err) {
		agents, err = nil, nil // no pod is captured by address then
	}
	if err = errors.Join(err,
		from.Get(ctx, types.NamespacedName{Namespace: Namespace, Name: Name}, &service),
		from.List(ctx, &parts, client.InNamespace(Namespace), client.MatchingLabels{discoveryv1.LabelServiceName: Name}),
	); err != nil {
		return nil, err
	}
	return Cluster(&service, agents, parts.Items, more, ca, meshCA)
}
