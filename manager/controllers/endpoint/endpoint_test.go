package endpoint

import (
	"testing"

	"github.com/stretchr/testify/require"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
)

func TestEndpointIsThatOfTheLeader(t *testing.T) {
	ctx := t.Context()
	env := testenv.New(t)
	c := &Controller{Client: env.Client, Namespace: "mesh", Service: "ctrlmesh-manager", PodName: "m-0", PodIP: "10.0.0.7", Address: ":8443"}
	require.NoError(t, c.Reconcile(ctx))
	e := testenv.Get(t, env, "mesh", "ctrlmesh-manager-leader", &discoveryv1.EndpointSlice{})
	require.Equal(t, "ctrlmesh-manager", e.Labels[discoveryv1.LabelServiceName])
	require.Equal(t, []string{"10.0.0.7"}, e.Endpoints[0].Addresses)
	require.EqualValues(t, 8443, *e.Ports[0].Port)
	require.Equal(t, "mesh", *e.Ports[0].Name)
	require.NoError(t, c.Reconcile(ctx))
	require.Equal(t, e.ResourceVersion, testenv.Get(t, env, "mesh", e.Name, &discoveryv1.EndpointSlice{}).ResourceVersion)

	c.PodIP = "fd00::7" // another leader, of another family
	require.NoError(t, c.Reconcile(ctx))
	e = testenv.Get(t, env, "mesh", e.Name, &discoveryv1.EndpointSlice{})
	require.Equal(t, discoveryv1.AddressTypeIPv6, e.AddressType)
	require.Equal(t, []string{"fd00::7"}, e.Endpoints[0].Addresses)
}
