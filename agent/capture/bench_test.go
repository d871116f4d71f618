package capture

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
)

// BenchmarkCapture captures one pod: for the first time, and after an agent that left its
// redirection there. It reports the processor time of the agent and of the programs that
// the agent runs.
func BenchmarkCapture(b *testing.B) {
	for _, m := range backends {
		for name, again := range map[string]bool{"first": false, "again": true} {
			b.Run(m.name+"/"+name, func(b *testing.B) {
				cfg := m.config(b)
				w := newWorld(b)
				m := w.agent(cfg)
				var own, others time.Duration
				b.StopTimer()
				for range b.N {
					pod := newNS(b)
					pod.Up("lo", "198.18.0.1/32")
					if again {
						p, err := m.Capture(request(m, uid, pod))
						require.NoError(b, err)
						require.NoError(b, p.Abandon())
						require.NoError(b, p.Release())
					}
					own0, others0 := processorTime(b)
					b.StartTimer()
					p, err := m.Capture(request(m, uid, pod))
					b.StopTimer()
					require.NoError(b, err)
					own1, others1 := processorTime(b)
					own, others = own+own1-own0, others+others1-others0
					require.NoError(b, p.Release())
					pod.Close()
				}
				b.ReportMetric(own.Seconds()*1000/float64(b.N), "own-ms/op")
				b.ReportMetric(others.Seconds()*1000/float64(b.N), "children-ms/op")
			})
		}
	}
}

// BenchmarkCheck checks 110 captured pods as often as an agent does.
func BenchmarkCheck(b *testing.B) {
	for _, m := range backends {
		if m.name == string(Address) {
			continue // its pods need links to the agent
		}
		b.Run(m.name, func(b *testing.B) {
			m := newWorld(b).agent(m.config(b))
			for i := range 110 {
				pod := newNS(b)
				pod.Up("lo", "198.18.0.1/32")
				require.NoError(b, pod.Link.RouteAdd(&netlink.Route{LinkIndex: 1, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}))
				captured(b, m, fmt.Sprintf("00000000-0000-4000-8000-%012d", i), pod, "mesh")
			}
			var checking time.Duration
			start, before, losses := time.Now(), processorTimes(b), 0
			for b.Loop() {
				time.Sleep(calmInterval)
				began := time.Now()
				losses += len(m.Check(true))
				checking += time.Since(began)
			}
			b.ReportMetric(100*(processorTimes(b)-before).Seconds()/time.Since(start).Seconds(), "%core")
			b.ReportMetric(checking.Seconds()*1000/float64(b.N), "check-ms")
			b.ReportMetric(0, "ns/op") // most of it was slept
			require.Zero(b, losses)
		})
	}
}

func processorTimes(b *testing.B) time.Duration {
	own, children := processorTime(b)
	return own + children
}

func processorTime(b *testing.B) (own, children time.Duration) {
	var times [2]time.Duration
	for i, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		require.NoError(b, unix.Getrusage(who, &u))
		times[i] = time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return times[0], times[1]
}

// BenchmarkDial compares the agent's dial from a pod's network namespace with a
// plain one, both within one namespace: what entering, marking and leaving cost.
func BenchmarkDial(b *testing.B) {
	for _, m := range backends {
		b.Run(m.name, func(b *testing.B) {
			cfg := m.config(b)
			w := newWorld(b)
			p := captured(b, w.agent(cfg), uid, w.pod(), "mesh")
			var l net.Listener
			require.NoError(b, netns.Do(p.known.NetNS, func() (err error) {
				l, err = net.Listen("tcp4", "127.0.0.1:0")
				return err
			}))
			answer(b, "near", l)
			for b.Loop() {
				c, err := p.DialContext(context.Background(), "tcp", l.Addr().String())
				require.NoError(b, err)
				c.Close()
			}
		})
	}
	b.Run("plain", func(b *testing.B) {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		require.NoError(b, err)
		answer(b, "plain", l)
		for b.Loop() {
			c, err := net.Dial("tcp4", l.Addr().String())
			require.NoError(b, err)
			c.Close()
		}
	})
}
