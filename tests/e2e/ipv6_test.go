package e2e

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The apiserver has only IPv6 addresses.
func TestIPv6(t *testing.T) {
	if a := netip.MustParseAddrPort(apiserver(t)).Addr(); a.Is4() {
		t.Skipf("the apiserver's Service is %s: this is about a cluster with IPv6; `make e2e-ipv6` starts one", a)
	}
	for _, way := range captureModes {
		t.Run(way, func(t *testing.T) {
			start := time.Now()
			p := newPair(t, capturedBy(way))
			require.Equal(t, way, p.capture(t))
			require.True(t, netip.MustParseAddr(p.a.Status.PodIP).Is6())
			requireOwnAddress(t, p.a.Pod, start)

			p.agentKilled(t)
			start = time.Now()
			p.a.owns = owned(t)
			owns(t, p.namespace, "a", p.a.owns)
			p.a.works(t)
			requireOwnAddress(t, p.a.Pod, start)
		})
	}
}
