package capture

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// It is refused until the next agent sets the ports.
func TestEgressIsRefusedWithoutAnAgent(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		first := w.agent(cfg)
		setEgress(t, captured(t, first, uid, pod, "first"), "first", egressPorts...)
		require.NoError(t, first.Close())
		refused := func() {
			t.Helper()
			for _, to := range []netip.AddrPort{other4, other6} {
				_, _, err := client{}.connect(pod, to)
				require.ErrorIs(t, err, unix.ECONNREFUSED)
			}
			requireDatagrams(t, pod, true, other4, other6)
		}
		refused()
		second := w.agent(cfg)
		p := captured(t, second, uid, pod, "second")
		refused()
		requireAnswer(t, pod, client{}, service4, "second", "")
		setEgress(t, p, "second", egressPorts...)
		requireAnswer(t, pod, client{}, other4, "second", other4.String())
		requireDatagrams(t, pod, true, other4, other6)
		require.NoError(t, second.Close())

		third := w.agent(cfg)
		p = captured(t, third, uid, pod, "third")
		refused()
		setEgress(t, p, "")
		requireAnswer(t, pod, client{}, other4, "direct", "")
		requireDatagrams(t, pod, false, other4, other6)
	})
}

// No connection goes direct, either.
func TestTakeoverRefusesNoEgress(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) {
		w := newWorld(t)
		pod := w.pod()
		var h *hammer
		var last *Pod
		for _, name := range []string{"first", "second", "third"} {
			m := w.agent(cfg)
			r := request(m, uid, pod)
			if last != nil {
				var err error
				r.Files, err = last.Files()
				require.NoError(t, err)
				require.Len(t, r.Files.Egress, 2)
			}
			p := capturedBy(t, m, r, name)
			if h != nil {
				h.await(8) // the last one serves
			}
			setEgress(t, p, name, egressPorts...)
			if h == nil {
				h = startHammer(t, pod, other4, other6)
			} else {
				require.Equal(t, last.egress.Port, p.egress.Port)
				require.NoError(t, last.Abandon())
				_, err := last.SetEgress(nil)
				require.ErrorIs(t, err, os.ErrClosed, "it is another's")
			}
			h.await(20)
			last = p
		}
		counts := h.stop()
		require.Len(t, counts, 3, "a connection failed, or went direct")
		require.NotZero(t, counts["third"])
	})
}

// Nothing goes direct between the agents, or before the second sets the ports.
func TestEgressOutlivesAChangeOfMode(t *testing.T) {
	w := newWorld(t)
	pod := w.pod()
	cfg := byEBPF.config(t)
	cfg.Mode = Auto
	var last Backend
	for i, mode := range []Mode{EBPF, IPTables, EBPF} {
		if last != nil {
			require.NoError(t, last.Close())
		}
		last = w.agent(cfg)
		p := capturedBy(t, last, Request{UID: uid, NetNS: pod.Path, Mode: mode, Egress: []uint16{6443, 443, 443}}, "mesh")
		who, _, err := client{patience: 200 * time.Millisecond}.connect(pod, other4)
		require.Error(t, err, "%s answered", who)
		requireDatagrams(t, pod, true, other4, other6)
		setEgress(t, p, fmt.Sprint("agent", i), egressPorts...)
		requireAnswer(t, pod, client{}, other4, fmt.Sprint("agent", i), other4.String())
		requireAnswer(t, pod, client{}, service4, "mesh", "")
	}
	p, err := last.Capture(Request{UID: uid, NetNS: pod.Path, Mode: EBPF})
	require.NoError(t, err)
	setEgress(t, p, "")
	requireAnswer(t, pod, client{}, other4, "direct", "")
}
