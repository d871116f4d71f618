package bpf_test

import (
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

// BenchmarkConnect compares the duration of connect(), in turns: to a port on lo without
// hooks, with them, and redirected. It reports medians, and medians of the ratios to the
// first in the same round.
func BenchmarkConnect(b *testing.B) {
	hooked := bpftest.Cgroup(b)
	r, err := bpf.Open(hooked, bpftest.BPFFS(b))
	require.NoError(b, err)
	defer r.Close()
	cookie := namespace(b)
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(b, err)
	defer unix.Close(listener)
	require.NoError(b, unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(b, unix.Listen(listener, 1))
	at, err := unix.Getsockname(listener)
	require.NoError(b, err)
	loopback := addrPort(at)
	require.NoError(b, r.SetDestinations([]netip.AddrPort{service4}))

	require.NoError(b, r.SetEgress([16]byte{}, []uint16{elsewhere4.Port()}, nil))

	ways := []struct {
		name   string
		cgroup string
		to     netip.AddrPort
		open   bool
	}{
		{"plain", filepath.Dir(hooked), loopback, false},
		{"unlisted", hooked, loopback, false},
		{"redirected", hooked, service4, false},
		{"redirected-open", hooked, service4, true},
		{"egress", hooked, elsewhere4, false},
	}
	const connects = 200 // of each kind in a round
	took, ratios := make([][]float64, len(ways)), make([][]float64, len(ways))
	for b.Loop() {
		for i, way := range ways {
			join(b, way.cgroup)
			require.NoError(b, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{Port: loopback.Port(), Open: way.open, Egress: loopback.Port()}))
			r.Beat()
			var times []float64
			for range connects {
				times = append(times, float64(timeConnect(b, listener, way.to)))
			}
			took[i] = append(took[i], median(times))
			ratios[i] = append(ratios[i], median(times)/took[0][len(took[0])-1])
		}
	}
	for i, way := range ways {
		b.ReportMetric(median(took[i]), way.name+"-ns")
		b.ReportMetric(median(ratios[i]), way.name+"-ratio")
	}
	b.ReportMetric(0, "ns/op") // the time of a whole round has no meaning
}

func timeConnect(b *testing.B, listener int, to netip.AddrPort) time.Duration {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(b, err)
	address := sockaddr(to, unix.AF_INET)
	start := time.Now()
	err = unix.Connect(fd, address)
	took := time.Since(start)
	require.NoError(b, err)
	accepted, _, err := unix.Accept(listener)
	require.NoError(b, err)
	require.NoError(b, unix.SetsockoptLinger(accepted, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	require.NoError(b, unix.Close(accepted))
	require.NoError(b, unix.Close(fd))
	return took
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
