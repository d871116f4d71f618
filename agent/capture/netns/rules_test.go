package netns_test

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
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

// Processes in the pod can send messages to the socket: they are not taken for the kernel's.
func TestForgedGenerationsAreIgnored(t *testing.T) {
	n := netnstest.New(t)
	rules, err := netns.OpenRules(n.File)
	require.NoError(t, err)
	defer rules.Close()
	generation, err := rules.Generation()
	require.NoError(t, err)
	forge := func(times int) {
		next := nl.NewNetlinkRequest(0, 0).Seq + 1
		require.NoError(t, n.Do(func() error {
			port, err := port()
			if err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			message := binary.NativeEndian.AppendUint32(nil, 28)
			message = binary.NativeEndian.AppendUint16(message, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN)
			message = binary.NativeEndian.AppendUint16(message, 0)
			message = binary.NativeEndian.AppendUint32(message, next)
			message = append(message, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 1, 0, 1, 2, 3, 4)
			for range times {
				if err := unix.Sendto(fd, message, unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	forge(3)
	now, err := rules.Generation()
	require.NoError(t, err)
	require.Equal(t, generation, now)
	forge(100)
	require.Eventually(t, func() bool {
		now, err := rules.Generation()
		return err == nil && now == generation
	}, 10*time.Second, time.Millisecond, "they are read at last")
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
