package upstream

import (
	"encoding/pem"
	"net/http/httptest"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Clients may connect to additional addresses of the apiserver. The proxy does not.
func TestAdditionalAddressesAreNotDialed(t *testing.T) {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	m := &meshv1.Cluster{
		ServiceAddresses: []string{"192.0.2.1:443"}, AdditionalAddresses: []string{"192.0.2.2:6443"},
		Ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	}
	c, err := NewCluster(m)
	require.NoError(t, err)
	require.True(t, c.Has(netip.MustParseAddrPort("[::ffff:192.0.2.2]:6443")))
	require.False(t, c.Has(netip.MustParseAddrPort("192.0.2.2:443")))
	require.Equal(t, []string{"192.0.2.1:443"}, c.addresses)

	m.AdditionalAddresses = nil
	without, err := NewCluster(m)
	require.NoError(t, err)
	require.False(t, c.Equal(without), "pods learn of the change")
}
