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
	c, err := Cluster(service, slices, []byte("ca"), []byte("mesh"))
	require.NoError(t, err)
	require.Equal(t, []string{"10.96.0.1:443", "[fd00::1]:443"}, c.ServiceAddresses)
	require.Equal(t, []string{"192.0.2.1:6443", "192.0.2.2:6443"}, c.EndpointAddresses)
	require.Equal(t, netip.MustParseAddr("fd00::1"), Addresses(c)[1])

	slices[0].Endpoints[0], slices[0].Endpoints[1] = slices[0].Endpoints[1], slices[0].Endpoints[0]
	again, err := Cluster(service, slices, []byte("ca"), []byte("mesh"))
	require.NoError(t, err)
	require.Equal(t, c.Version, again.Version)

	other2, err := Cluster(service, slices, []byte("another"), []byte("mesh"))
	require.NoError(t, err)
	require.NotEqual(t, c.Version, other2.Version)

	renewed, err := Cluster(service, slices, []byte("ca"), []byte("another mesh"))
	require.NoError(t, err)
	require.NotEqual(t, c.MeshCa, renewed.MeshCa, "agents must ask for a new leaf")
	require.NotEqual(t, c.Version, renewed.Version)
}

func TestNothingUsable(t *testing.T) {
	_, err := Cluster(&corev1.Service{}, nil, []byte("ca"), nil)
	require.Error(t, err, "no address")
	_, err = Cluster(&corev1.Service{Spec: corev1.ServiceSpec{
		ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "https", Port: 443}},
	}}, nil, nil, nil)
	require.Error(t, err, "no CA")
}
