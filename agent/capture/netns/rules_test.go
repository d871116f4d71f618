package netns_test

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/internal/netnstest"
)

// The generation of the rules in a network namespace changes with them alone.
func TestGenerationChangesWithTheRules(t *testing.T) {
	n := netnstest.New(t)
	rules, err := netns.OpenRules(n.File)
	require.NoError(t, err)
	run := func(n *netnstest.NS, commands string) {
		require.NoError(t, n.Do(func() error { return exec.Command("nft", commands).Run() }))
	}
	last := uint32(0)
	changed := func() bool {
		now, err := rules.Generation()
		require.NoError(t, err)
		before := last
		last = now
		return now != before
	}
	changed()
	require.False(t, changed())
	run(n, "add table ip t")
	require.True(t, changed())
	require.False(t, changed())
	run(netnstest.New(t), "add table ip t")
	require.False(t, changed(), "of another network namespace")

	rules.Close()
	_, err = rules.Generation()
	require.ErrorIs(t, err, os.ErrClosed)
	other, err := netns.OpenRules(n.File) // gets the descriptor's number
	require.NoError(t, err)
	rules.Close()
	_, err = other.Generation()
	require.NoError(t, err, "closed by another's second Close")
	other.Close()
}

// A process in the pod cannot send messages to the socket that would be taken for the kernel's.
func TestGenerationsCannotBeForged(t *testing.T) {
	n := netnstest.New(t)
	rules, err := netns.OpenRules(n.File)
	require.NoError(t, err)
	defer rules.Close()
	err = n.Do(func() error {
		port, err := port()
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, make([]byte, unix.NLMSG_HDRLEN), unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port})
	})
	require.ErrorIs(t, err, unix.ECONNREFUSED)
}

// port returns the port of the netlink socket in the calling thread's network namespace.
func port() (uint32, error) {
	list, err := os.ReadFile("/proc/thread-self/net/netlink")
	for line := range strings.Lines(string(list)) {
		if fields := strings.Fields(line); fields[1] == strconv.Itoa(unix.NETLINK_NETFILTER) && fields[2] != "0" {
			port, err := strconv.ParseUint(fields[2], 10, 32)
			return uint32(port), err
		}
	}
	return 0, cmp.Or(err, fmt.Errorf("no socket in %s", list))
}

func BenchmarkGeneration(b *testing.B) {
	rules, err := netns.OpenRules(netnstest.New(b).File)
	require.NoError(b, err)
	defer rules.Close()
	for b.Loop() {
		_, err := rules.Generation()
		require.NoError(b, err)
	}
}
