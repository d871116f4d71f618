// Package netnstest makes network namespaces for tests.
package netnstest

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// NS is a network namespace that lives as long as its file and what was made in it.
type NS struct {
	T    testing.TB
	File *os.File
	Path string
	Link *netlink.Handle
	once sync.Once
}

// New makes a network namespace, of which nothing is left after the test. It needs root.
func New(t testing.TB) *NS {
	t.Helper()
	needs.Root(t, "makes network namespaces")
	n := &NS{T: t}
	require.NoError(t, netns.OnOwnGoroutine(func() error {
		home, err := os.Open(netns.Own)
		if err != nil {
			return err
		}
		defer home.Close()
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		if n.File, err = os.Open(netns.Own); err != nil {
			return err
		}
		if err := netns.Set(home); err != nil {
			return err
		}
		runtime.UnlockOSThread()
		return nil
	}))
	n.Path = fmt.Sprintf("/proc/self/fd/%d", n.File.Fd())
	var err error
	n.Link, err = netlink.NewHandleAt(vnetns.NsHandle(n.File.Fd()), unix.NETLINK_ROUTE)
	require.NoError(t, err)
	t.Cleanup(n.Close)
	n.Up("lo")
	return n
}

// Close gives up the namespace before the test ends.
func (n *NS) Close() {
	n.once.Do(func() {
		n.Link.Close()
		n.File.Close()
	})
}

// Do runs f in the namespace.
func (n *NS) Do(f func() error) error { return netns.Do(n.File, f) }

// Listen listens in the namespace.
func (n *NS) Listen(network, at string) (l net.Listener) {
	n.T.Helper()
	require.NoError(n.T, n.Do(func() (err error) {
		l, err = net.Listen(network, at)
		return err
	}))
	return l
}

// Up sets a device up and gives it addresses, for IPv6 without duplicate address detection.
func (n *NS) Up(device string, addresses ...string) {
	n.T.Helper()
	l, err := n.Link.LinkByName(device)
	require.NoError(n.T, err)
	for _, a := range addresses {
		address, err := netlink.ParseAddr(a)
		require.NoError(n.T, err)
		if address.IP.To4() == nil {
			address.Flags = unix.IFA_F_NODAD
		}
		require.NoError(n.T, n.Link.AddrAdd(l, address))
	}
	require.NoError(n.T, n.Link.LinkSetUp(l))
}
