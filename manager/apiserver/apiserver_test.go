package apiserver

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

func TestCluster(t *testing.T) {
	https, other, p := "https", "other", int32(6443)
	service := &corev1.Service{Spec: corev1.ServiceSpec{
		ClusterIPs: []string{"10.96.0.1", "fd00::1"},
		Ports:      []corev1.ServicePort{{Name: "https", Port: 443}},
	}}
	slices := []discoveryv1.EndpointSlice{
		{Ports: []discoveryv1.EndpointPort{{Name: &https, Port: &p}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.2"}}, {Addresses: []string{"192.0.2.1"}}}},
		{Ports: []discoveryv1.EndpointPort{{Name: &other, Port: &p}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.3"}}}},
		{Ports: []discoveryv1.EndpointPort{{Name: &https, Port: &p}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}}},
	}
	c, err := Cluster(service, nil, slices, Additional{}, []byte("ca"), []byte("mesh"))
	require.NoError(t, err)
	require.Equal(t, []string{"10.96.0.1:443", "[fd00::1]:443"}, c.ServiceAddresses)
	require.Equal(t, []string{"192.0.2.1:6443", "192.0.2.2:6443"}, c.EndpointAddresses)
	_, addresses := Hosts(c)
	require.Equal(t, netip.MustParseAddr("fd00::1"), addresses[1])

	slices[0].Endpoints[0], slices[0].Endpoints[1] = slices[0].Endpoints[1], slices[0].Endpoints[0]
	again, err := Cluster(service, nil, slices, Additional{}, []byte("ca"), []byte("mesh"))
	require.NoError(t, err)
	require.Equal(t, c.Version, again.Version)

	other2, err := Cluster(service, nil, slices, Additional{}, []byte("another"), []byte("mesh"))
	require.NoError(t, err)
	require.NotEqual(t, c.Version, other2.Version)

	renewed, err := Cluster(service, nil, slices, Additional{}, []byte("ca"), []byte("another mesh"))
	require.NoError(t, err)
	require.NotEqual(t, c.MeshCa, renewed.MeshCa, "agents must ask for a new leaf")
	require.NotEqual(t, c.Version, renewed.Version)
}

// Agents redirect the additional addresses; certificates are valid for what clients name.
func TestAdditional(t *testing.T) {
	service := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}}}}
	without, err := Cluster(service, nil, nil, Additional{}, []byte("ca"), nil)
	require.NoError(t, err)
	c, err := Cluster(service, nil, nil, Additional{
		Hosts: []string{"192.0.2.7", "api.example.com"},
		At:    []netip.AddrPort{netip.MustParseAddrPort("192.0.2.7:6443"), netip.MustParseAddrPort("192.0.2.8:443")},
	}, []byte("ca"), nil)
	require.NoError(t, err)
	require.NotEqual(t, without.Version, c.Version)
	require.Equal(t, []string{"192.0.2.7:6443", "192.0.2.8:443"}, c.AdditionalAddresses)
	require.Empty(t, c.EndpointAddresses, "they are not dialed")
	names, addresses := Hosts(c)
	require.Equal(t, []string{"api.example.com"}, names)
	require.Equal(t, []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("192.0.2.7")}, addresses)
}

func TestNothingUsable(t *testing.T) {
	_, err := Cluster(&corev1.Service{}, nil, nil, Additional{}, []byte("ca"), nil)
	require.Error(t, err, "no address")
	_, err = Cluster(&corev1.Service{Spec: corev1.ServiceSpec{
		ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}},
	}}, nil, nil, Additional{}, nil, nil)
	require.Error(t, err, "no CA")
}

func TestAgents(t *testing.T) {
	service := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}}}}
	agents := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.9", "fd00::9"}, Ports: []corev1.ServicePort{{Port: 6443}}}}
	without, err := Cluster(service, nil, nil, Additional{}, []byte("ca"), nil)
	require.NoError(t, err)
	require.Empty(t, without.AgentAddresses)
	c, err := Cluster(service, agents, nil, Additional{}, []byte("ca"), nil)
	require.NoError(t, err)
	require.Equal(t, []string{"10.96.0.9:6443", "[fd00::9]:6443"}, c.AgentAddresses)
	require.NotEqual(t, without.Version, c.Version)
	_, addresses := Hosts(c)
	require.Contains(t, addresses, netip.MustParseAddr("fd00::9"), "their certificates name it")

	require.Empty(t, Agents(&corev1.Service{}), "no port yet")
	agents.Spec.ClusterIPs = []string{"None"}
	require.Empty(t, Agents(agents), "headless")
}
