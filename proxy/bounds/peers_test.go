package bounds

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPeersLeavePartsForOthers(t *testing.T) {
	p := Peers{Pool: NewPool(1000, 0), Own: 10}
	address := netip.MustParseAddr("192.0.2.1")
	var greedy []*Share
	for range 4 {
		for { // with a share for each request
			s := p.Open(address)
			if !s.Take(10) {
				s.Close()
				break
			}
			greedy = append(greedy, s)
		}
		address = address.Next()
	}
	require.LessOrEqual(t, p.Taken(), int64(2*1000+4*10))
	last := p.Open(address)
	require.True(t, last.Take(10))
	require.True(t, last.Take(10), "there is more than its own part")
	for _, s := range append(greedy, last) {
		s.Close()
	}
	require.Zero(t, p.Taken())
	require.Empty(t, p.peers)
	require.EqualValues(t, 2*1000, p.Pool.free.Load())
}
