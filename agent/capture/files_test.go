package capture

import (
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/listener"
)

func TestInvalidFilesAreIgnored(t *testing.T) {
	w := newWorld(t)
	pod, elsewhere := w.pod(), w.pod()
	m := agent(t, iptablesConfig(t))
	listenIn := func(n *ns, network, at string, config net.ListenConfig) *os.File {
		var f *os.File
		config.SetMultipathTCP(false)
		require.NoError(t, n.Do(func() error {
			l, err := config.Listen(t.Context(), network, at)
			if err != nil {
				return err
			}
			defer l.Close()
			files, err := listener.Duplicates([]*net.TCPListener{l.(*net.TCPListener)})
			f = files[0]
			return err
		}))
		return f
	}
	plain := func(kind, protocol int) *os.File {
		fd, err := unix.Socket(unix.AF_INET, kind, protocol)
		require.NoError(t, err)
		return os.NewFile(uintptr(fd), "socket")
	}
	pipe, other, err := os.Pipe()
	require.NoError(t, err)
	defer other.Close()
	closed := plain(unix.SOCK_STREAM, 0)
	require.NoError(t, closed.Close())
	for name, f := range map[string]*os.File{
		"another pod's":      listenIn(elsewhere, "tcp", "127.0.0.1:0", net.ListenConfig{}),
		"for all addresses":  listenIn(pod, "tcp4", "0.0.0.0:0", net.ListenConfig{}),
		"for all, of IPv6":   listenIn(pod, "tcp6", "[::]:0", net.ListenConfig{}),
		"with a shared port": listenIn(pod, "tcp", "127.0.0.1:0", net.ListenConfig{Control: reusePort}),
		"not listening":      plain(unix.SOCK_STREAM, 0),
		"UDP":                plain(unix.SOCK_DGRAM, 0),
		"a pipe":             pipe,
		"closed":             closed,
	} {
		t.Run(name, func(t *testing.T) {
			r := request(m, uid, pod)
			r.Files = &Files{Listeners: []*os.File{f}}
			p, err := m.Capture(r)
			require.NoError(t, err)
			_, err = f.Stat()
			require.ErrorIs(t, err, os.ErrClosed, "it was taken over")
			answer(t, "mesh", p.Listeners()...)
			for _, to := range listed {
				requireAnswer(t, pod, client{}, to, "mesh", "")
			}
			require.NoError(t, p.Release())
		})
	}

	// What is handed over is closed though nothing comes of it.
	f := plain(unix.SOCK_STREAM, 0)
	_, err = m.Capture(Request{UID: "none", Files: &Files{Listeners: []*os.File{f}}})
	require.Error(t, err)
	_, err = f.Stat()
	require.ErrorIs(t, err, os.ErrClosed)

	// One listener of two is of use, if the other can be had.
	half := listenIn(pod, "tcp", "127.0.0.1:0", net.ListenConfig{})
	port := func() int {
		at, err := unix.Getsockname(int(half.Fd()))
		require.NoError(t, err)
		return at.(*unix.SockaddrInet4).Port
	}()
	r := request(m, uid, pod)
	r.Files = &Files{Listeners: []*os.File{half}}
	p, err := m.Capture(r)
	require.NoError(t, err)
	require.Len(t, p.Listeners(), 2)
	require.Equal(t, port, int(p.known.Port))
}
