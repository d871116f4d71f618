package sockdiag

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func FuzzParse(f *testing.F) {
	f.Add([]byte{unix.AF_INET})
	f.Add(make([]byte, sizeofDiagMsg+4))
	f.Fuzz(func(_ *testing.T, message []byte) { parse(message) })
}

func TestEachStopsEarly(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	for range 2 {
		c, err := net.Dial("tcp4", l.Addr().String())
		require.NoError(t, err)
		defer c.Close()
	}
	for _, bound := range []int{1, 2} {
		n, err := Open()
		require.NoError(t, err)
		found := 0
		require.NoError(t, n.Each([]uint8{unix.IPPROTO_TCP}, func(Connection) bool {
			found++
			return found < bound
		}))
		n.Close()
		require.Equal(t, bound, found)
	}
}
