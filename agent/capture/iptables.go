package capture

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"time"
	"unsafe"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Mark is the mark (SO_MARK) of the agent's own sockets, which the rules let
// pass. It can be forged by whoever holds CAP_NET_ADMIN or CAP_NET_RAW in the
// pod's network namespace: what stops those is the mesh CA alone. BPF does not
// ask for it.
const Mark = 0x6d657368 // "mesh"

const (
	// rulesTime is how long the rules of all pods may take to change, or one pod's
	// to go: there are pods that hold the programs up.
	rulesTime = 5 * time.Second
	// rulesAtOnce is of how many pods.
	rulesAtOnce = 4
)

// iptables redirects by rules in each pod's network namespace.
type iptables struct {
	tables       [2]natTable // IPv4, IPv6
	log          *slog.Logger
	destinations []netip.AddrPort
}

func openIPTables(cfg Config) (redirector, error) {
	tables, err := openNATTables(cfg.IPTables)
	if err != nil {
		return nil, err
	}
	t := &iptables{tables: tables, log: cfg.Logger}
	if err := t.try(); err != nil {
		return nil, err
	}
	return t, nil
}

// try makes rules where they harm nobody: that the program is there does not
// mean that the kernel takes them.
func (t *iptables) try() error {
	netns, err := newNetNS()
	if err != nil {
		return err
	}
	defer netns.Close()
	somewhere := []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 1}), 443)}
	return inNetNS(netns, func() error { return t.tables[0].sync(context.Background(), somewhere, 1, nil, true) })
}

func (t *iptables) mode() Mode { return IPTables }

func (t *iptables) slow() bool { return true }

func (t *iptables) hostNetwork() error {
	return errors.New("rules hold for all of a network namespace, which under hostNetwork is the node's")
}

// last is what an earlier agent's rules say: with the same ports they need no change.
func (t *iptables) last(p *Pod) (port uint16, elsewhere *egress) {
	leads := make(chan lead, len(t.tables))
	_ = t.each(p.netns, func(table natTable) error {
		l, err := table.lastLeads(context.Background())
		leads <- l
		return err
	})
	for range len(leads) {
		l := <-leads
		port = cmp.Or(port, l.port)
		if l.egress != 0 {
			elsewhere = &egress{ports: l.ports, port: l.egress}
		}
	}
	return port, elsewhere
}

func (t *iptables) canEgress() error { return nil }

// origin asks connection tracking.
func (t *iptables) origin(_ *Pod, conn *net.TCPConn) (netip.AddrPort, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	near, _ := ends(conn)
	var to netip.AddrPort
	if cerr := raw.Control(func(fd uintptr) { to, err = originalDestination(fd, near.Addr().Is6()) }); cerr != nil {
		return netip.AddrPort{}, cerr
	}
	if errors.Is(err, unix.ENOENT) || err == nil && to == near {
		return netip.AddrPort{}, nil // it was made to the listener
	}
	return to, err
}

func (t *iptables) redirect(ctx context.Context, p *Pod) error {
	return t.sync(ctx, p, t.destinations, true)
}

// setDestinations fails for no pod: what one does not let happen is no reason to
// leave the others, and is mended later.
func (t *iptables) setDestinations(destinations []netip.AddrPort, pods []*Pod) error {
	for _, p := range pods {
		p.stopMending() // to the destinations of before
	}
	t.destinations = destinations
	ctx, cancel := context.WithTimeout(context.Background(), rulesTime)
	defer cancel()
	var group errgroup.Group
	group.SetLimit(rulesAtOnce)
	for _, p := range pods {
		if p.vitals.damage != nil {
			continue
		}
		group.Go(func() error {
			if err := t.sync(ctx, p, destinations, false); err != nil {
				p.damaged(fmt.Errorf("change the destinations: %w", err))
			}
			return nil
		})
	}
	return group.Wait()
}

// sync makes the rules of the pod right. Rules that lead to another port are
// another agent's: they are replaced if seize, else left as they are.
func (t *iptables) sync(ctx context.Context, p *Pod, destinations []netip.AddrPort, seize bool) error {
	return t.each(p.netns, func(table natTable) error {
		err := table.sync(ctx, destinations, p.port, p.egress, seize)
		if err != nil && table.family == 6 && !haveIPv6() {
			t.log.Debug("no rules for IPv6 where there is none", "pod", p.uid, "reason", err)
			return nil
		}
		return err
	})
}

func (t *iptables) release(p *Pod) error {
	p.stopMending()
	ctx, cancel := context.WithTimeout(context.Background(), rulesTime)
	defer cancel()
	return t.each(p.netns, func(table natTable) error { return table.remove(ctx, p.port, p.egress) })
}

// each calls f for both tables in netns, at once: mostly it waits for programs.
func (t *iptables) each(netns *os.File, f func(natTable) error) error {
	var errs [2]error
	var wg sync.WaitGroup
	for i, table := range t.tables {
		wg.Go(func() { errs[i] = inNetNS(netns, func() error { return f(table) }) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// setFailOpen has nothing to do: rules cannot tell whether anybody listens.
func (t *iptables) setFailOpen(*Pod) error { return nil }

// mark has nothing to do: the mark that rules see, all sockets get.
func (t *iptables) mark(int) error { return nil }

// sweep has nothing to do: rules go with their network namespace.
func (t *iptables) sweep(func(uuid.UUID) bool) error { return nil }

// beat has nothing to do: rules do not ask whether anybody lives.
func (t *iptables) beat() bool { return false }

// check looks whether UDP is refused, of pods with egress. All else a probe shows. What
// is wrong is mended like all of a pod.
func (t *iptables) check(pods []*Pod) error {
	for _, p := range pods {
		if p.egress == nil || p.vitals.damage != nil {
			continue
		}
		if err := inNetNS(p.netns, func() error { return refusesUDP(p.egress.ports[0]) }); err != nil {
			v := &p.vitals
			v.damage, v.found = err, cmp.Or(v.found, err)
		}
	}
	return nil
}

// repair has nothing to do: pods share nothing.
func (t *iptables) repair([]netip.AddrPort, []*Pod) error { return nil }

func (t *iptables) close(pods []*Pod) error {
	for _, p := range pods {
		p.stopMending()
	}
	errs := make([]error, len(pods))
	var group errgroup.Group
	group.SetLimit(rulesAtOnce)
	for i, p := range pods {
		if p.failOpen {
			group.Go(func() error {
				errs[i] = t.release(p)
				return nil
			})
		}
	}
	_ = group.Wait()
	return errors.Join(errs...)
}

// forgetRules removes the rules from a network namespace, whichever agent's they are. It
// calls open only if there may be some.
func forgetRules(netns *os.File, open func() ([2]natTable, error)) error {
	return inNetNS(netns, func() error {
		if !(natTable{family: 4}).mayExist(nat) && !(natTable{family: 6}).mayExist(nat) {
			return nil
		}
		tables, err := open()
		if errors.Is(err, exec.ErrNotFound) {
			return nil // then there was no way to make rules either
		}
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), rulesTime)
		defer cancel()
		return errors.Join(tables[0].remove(ctx, 0, nil), tables[1].remove(ctx, 0, nil))
	})
}

// removeRules removes the rules from the network namespaces that paths name and that still exist.
func removeRules(cfg Config, paths []string) error {
	open := sync.OnceValues(func() ([2]natTable, error) { return openNATTables(cfg.IPTables) })
	var errs []error
	for _, path := range paths {
		netns, err := openNetNS(path, false)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrHostNetwork) {
			continue
		}
		if err == nil {
			err = forgetRules(netns, open)
			netns.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove rules from %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// haveIPv6 tells whether the calling thread's network namespace has an IPv6 address.
func haveIPv6() bool {
	addresses, err := os.ReadFile("/proc/thread-self/net/if_inet6")
	return err == nil && len(addresses) > 0 || err != nil && !errors.Is(err, os.ErrNotExist)
}

// originalDestination is where an accepted connection went before it was redirected.
func originalDestination(fd uintptr, v6 bool) (netip.AddrPort, error) {
	const original = 80 // SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST
	if v6 {
		var to unix.RawSockaddrInet6
		err := getsockopt(fd, unix.SOL_IPV6, original, unsafe.Pointer(&to), unsafe.Sizeof(to))
		return netip.AddrPortFrom(netip.AddrFrom16(to.Addr), networkOrder(to.Port)), err
	}
	var to unix.RawSockaddrInet4
	err := getsockopt(fd, unix.SOL_IP, original, unsafe.Pointer(&to), unsafe.Sizeof(to))
	return netip.AddrPortFrom(netip.AddrFrom4(to.Addr), networkOrder(to.Port)), err
}

func getsockopt(fd uintptr, level, name int, value unsafe.Pointer, size uintptr) error {
	length := uint32(size)
	if _, _, code := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, uintptr(level), uintptr(name), uintptr(value), uintptr(unsafe.Pointer(&length)), 0); code != 0 {
		return os.NewSyscallError("getsockopt", code)
	}
	return nil
}

// networkOrder is a port as the kernel has it in an address.
func networkOrder(port uint16) uint16 {
	return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, port))
}

// refusesUDP tries, from the calling thread's network namespace, to send to a port of
// nobody's. Where there is no way to, there is nothing to refuse.
func refusesUDP(port uint16) error {
	for family, nobody := range map[int]unix.Sockaddr{
		unix.AF_INET:  &unix.SockaddrInet4{Addr: [4]byte{192, 0, 2, 1}, Port: int(port)},
		unix.AF_INET6: &unix.SockaddrInet6{Addr: [16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1}, Port: int(port)},
	} {
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			continue
		}
		err = unix.Sendto(fd, nil, 0, nobody)
		_ = unix.Close(fd)
		if err == nil {
			return fmt.Errorf("a datagram to port %d was not refused", port)
		}
	}
	return nil
}
