package capture

import (
	"fmt"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// The agents overlap, or the second starts after the first has exited.
func TestNextAgentTakesOverWithoutFiles(t *testing.T) {
	for name, overlap := range map[string]bool{"overlapping": true, "after": false} {
		t.Run(name, func(t *testing.T) {
			forEachBackend(t, func(t *testing.T, cfg Config) {
				if overlap && cfg.Mode == Address {
					t.Skip("in mode Address agents that overlap have their own addresses")
				}
				w := newWorld(t)
				pod := w.pod()
				first := w.agent(cfg)
				captured(t, first, uid, pod, "first")

				h := startHammer(t, pod, destinations(cfg)...)
				h.await(8)
				if !overlap {
					require.NoError(t, first.Close())
					h.await(8)
				}
				second := w.agent(cfg)
				p := captured(t, second, uid, pod, "second")
				h.await(8)
				// An agent on its way out does not get the pod back, whatever it hears.
				if overlap {
					require.NoError(t, first.SetDestinations(listed, agents))
					require.NoError(t, first.(*node).pods[uid].Release())
				}
				for _, to := range destinations(cfg) {
					requireAnswer(t, pod, client{}, to, "second", "")
				}
				counts := h.stop()
				require.Zero(t, counts["direct"])
				require.NotZero(t, counts["first"])
				require.NotZero(t, counts["second"])
				if overlap {
					require.Len(t, counts, 2, "a connection failed")
				}

				requireDirectDial(t, p, service4)
			})
		})
	}
}

// The earlier agent has exited, or it passes its pods on.
func TestNextAgentCapturesByAnotherMode(t *testing.T) {
	for name, hand := range map[string]bool{"after": false, "handed over": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			pod := w.pod()
			cfg := backends[0].config(t)
			cfg.Mode, cfg.Address = Auto, ":7443"
			cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
			modes := []Mode{EBPF, IPTables, EBPF, IPTables}
			if !hand {
				modes = append(modes, Address, EBPF, Address)
			}
			var h *hammer
			var files *Files
			var last Backend
			for i, mode := range modes {
				if i > 0 && !hand {
					require.NoError(t, last.Close())
				}
				cfg := cfg
				if hand {
					cfg.Address = ""
				}
				m := w.agent(cfg)
				p, err := m.Capture(Request{UID: uid, NetNS: pod.Path, Mode: mode, Files: files})
				require.NoError(t, err)
				require.Equal(t, mode, p.Mode())
				name := fmt.Sprint("agent", i)
				answer(t, name, p.Listeners()...)
				if hand && i > 0 {
					require.NoError(t, last.(*node).pods[uid].Abandon())
				}
				to := service4
				if mode == Address {
					to = agent4
				}
				require.Eventually(t, func() bool { // what the last one's listener had taken, it answers
					who, _, err := client{}.connect(pod, to)
					require.NoError(t, err)
					return who == name
				}, soon, time.Millisecond)
				if mode == Address {
					// The earlier agent's redirection would turn it away.
					requireAnswer(t, pod, client{}, service4, "direct", "")
				}
				requireDirectDial(t, p, service4)
				if hand {
					if h == nil {
						h = startHammer(t, pod, service4, service6)
					}
					h.await(8)
					files, err = p.Files()
					require.NoError(t, err)
				}
				last = m
			}
			files.Close()
			if hand {
				counts := h.stop()
				require.Len(t, counts, len(modes), "a connection failed, or went direct")
				require.Zero(t, counts["direct"])
			}
		})
	}
}

func TestTakeoverRefusesNoConnection(t *testing.T) {
	forEachRedirection(t, func(t *testing.T, cfg Config) { // in mode Address agents that overlap have their own addresses
		w := newWorld(t)
		pod := w.pod()
		h := (*hammer)(nil)
		var last Backend
		var files *Files
		for _, name := range []string{"first", "second", "third"} {
			m := w.agent(cfg)
			r := request(m, uid, pod)
			r.Files = files
			p := capturedBy(t, m, r, name)
			if h == nil {
				h = startHammer(t, pod, listed...)
			} else {
				before := last.(*node).pods[uid]
				require.Equal(t, before.known.Port, p.known.Port, "the redirection has not changed")
				require.NoError(t, before.Abandon())
				// An agent on its way out leaves the pod alone, but ends what it began.
				require.NoError(t, last.SetDestinations(listed, agents))
				require.NoError(t, last.Sweep(func(string) bool { return true }))
				require.NoError(t, before.SetFailOpen(true))
				requireDirectDial(t, before, service4)
				require.NoError(t, before.Release())
				require.NoError(t, last.Close())
				_, _, err := dialAnswer(before, service4)
				require.ErrorIs(t, err, os.ErrClosed)
			}
			h.await(20)
			var err error
			files, err = p.Files()
			require.NoError(t, err)
			require.Len(t, files.Listeners, 2)
			for _, f := range files.Listeners {
				// Sending a file takes its number, and must not make the listener block.
				flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
				require.NoError(t, err)
				require.NotZero(t, flags&unix.O_NONBLOCK)
			}
			last = m
		}
		files.Close()
		counts := h.stop()
		require.Len(t, counts, 3, "a connection failed, or went direct")
		require.NotZero(t, counts["third"])
	})
}
