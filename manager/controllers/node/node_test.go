package node

import (
	corev1 "k8s.io/api/core/v1"

	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/testenv"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

func TestNewLeaderKeepsWhatTheLastOneWrote(t *testing.T) {
	ctx := t.Context()
	e := testenv.New(t)
	c := &Controller{Client: e.Client, Namespace: "mesh", Push: &push.Server{}}
	require.NoError(t, inject.WriteConfigMap(ctx, e.Client, "mesh", inject.HostNetworkConfigMap, inject.HostNetwork(true, nil)))
	data := func() map[string]string {
		return testenv.Get(t, e, "mesh", inject.HostNetworkConfigMap, &corev1.ConfigMap{}).Data
	}
	require.NoError(t, c.Reconcile(ctx))
	require.Equal(t, inject.HostNetwork(true, nil), data())
	c.since = time.Now().Add(-2 * status.Grace)
	require.NoError(t, c.Reconcile(ctx))
	require.Equal(t, inject.HostNetwork(false, nil), data())
}
