package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/iptables"
)

const (
	// rulesTime is how long the rules of all pods may take to change, or one pod's
	// to go: there are pods that hold the programs up.
	rulesTime = 5 * time.Second
	// rulesAtOnce is of how many pods.
	rulesAtOnce = 4
)

// rules redirects by rules in each pod's network namespace.
type rules struct {
	tables       [2]iptables.Table // IPv4, IPv6
	log          *slog.Logger
	destinations []netip.AddrPort
}

func openIPTables(cfg Config) (redirector, error) {
	tables, err := iptables.OpenTables(cfg.IPTables)
	if err != nil {
		return nil, err
	}
	t := &rules{tables: tables, log: cfg.Logger}
	if err := t.try(); err != nil {
		return nil, err
	}
	return t, nil
}

// try makes rules where they harm nobody: that the program is there does not
// mean that the kernel takes them.
func (t *rules) try() error {
	netns, err := newNetNS()
	if err != nil {
		return err
	}
	defer netns.Close()
	somewhere := []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 1}), 443)}
	return inNetNS(netns, func() error { return t.tables[0].Sync(context.Background(), somewhere, 1, nil, true) })
}

func (t *rules) mode() Mode { return IPTables }

func (t *rules) slow() bool { return true }

func (t *rules) hostNetwork() error {
	return errors.New("rules hold for all of a network namespace, which under hostNetwork is the node's")
}

// last is what an earlier agent's rules say: with the same ports they need no change.
func (t *rules) last(p *Pod) (port uint16, elsewhere *egress) {
	leads := make(chan iptables.Lead, len(t.tables))
	_ = t.each(p.netns, func(table iptables.Table) error {
		l, err := table.LastLead(context.Background())
		leads <- l
		return err
	})
	for range len(leads) {
		l := <-leads
		port = cmp.Or(port, l.Port)
		if l.Egress != 0 {
			elsewhere = &egress{ports: l.Ports, port: l.Egress}
		}
	}
	return port, elsewhere
}

func (t *rules) canEgress() error { return nil }

// origin asks connection tracking.
func (t *rules) origin(_ *Pod, conn *net.TCPConn) (netip.AddrPort, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	near, _ := ends(conn)
	var to netip.AddrPort
	if cerr := raw.Control(func(fd uintptr) { to, err = iptables.OriginalDestination(fd, near.Addr().Is6()) }); cerr != nil {
		return netip.AddrPort{}, cerr
	}
	if errors.Is(err, unix.ENOENT) || err == nil && to == near {
		return netip.AddrPort{}, nil // it was made to the listener
	}
	return to, err
}

func (t *rules) redirect(ctx context.Context, p *Pod) error {
	return t.sync(ctx, p, t.destinations, true)
}

// setDestinations fails for no pod: what one does not let happen is no reason to
// leave the others, and is mended later.
func (t *rules) setDestinations(destinations []netip.AddrPort, pods []*Pod) error {
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
func (t *rules) sync(ctx context.Context, p *Pod, destinations []netip.AddrPort, seize bool) error {
	return t.each(p.netns, func(table iptables.Table) error {
		err := table.Sync(ctx, destinations, p.port, p.egress.rules(), seize)
		if err != nil && table.Family == 6 && !iptables.HaveIPv6() {
			t.log.Debug("no rules for IPv6 where there is none", "pod", p.uid, "reason", err)
			return nil
		}
		return err
	})
}

func (t *rules) release(p *Pod) error {
	p.stopMending()
	ctx, cancel := context.WithTimeout(context.Background(), rulesTime)
	defer cancel()
	return t.each(p.netns, func(table iptables.Table) error { return table.Remove(ctx, p.port, p.egress.rules()) })
}

// each calls f for both tables in netns, at once: mostly it waits for programs.
func (t *rules) each(netns *os.File, f func(iptables.Table) error) error {
	var errs [2]error
	var wg sync.WaitGroup
	for i, table := range t.tables {
		wg.Go(func() { errs[i] = inNetNS(netns, func() error { return f(table) }) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// setFailOpen has nothing to do: rules cannot tell whether anybody listens.
func (t *rules) setFailOpen(*Pod) error { return nil }

// mark has nothing to do: the mark that rules see, all sockets get.
func (t *rules) mark(int) error { return nil }

// sweep has nothing to do: rules go with their network namespace.
func (t *rules) sweep(func(uuid.UUID) bool) error { return nil }

// beat has nothing to do: rules do not ask whether anybody lives.
func (t *rules) beat() bool { return false }

// check looks whether UDP is refused, of pods with egress. All else a probe shows. What
// is wrong is mended like all of a pod.
func (t *rules) check(pods []*Pod) error {
	for _, p := range pods {
		if p.egress == nil || p.vitals.damage != nil {
			continue
		}
		if err := inNetNS(p.netns, func() error { return iptables.RefusesUDP(p.egress.ports[0]) }); err != nil {
			v := &p.vitals
			v.damage, v.found = err, cmp.Or(v.found, err)
		}
	}
	return nil
}

// repair has nothing to do: pods share nothing.
func (t *rules) repair([]netip.AddrPort, []*Pod) error { return nil }

func (t *rules) close(pods []*Pod) error {
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
func forgetRules(netns *os.File, open func() ([2]iptables.Table, error)) error {
	return inNetNS(netns, func() error {
		if !(iptables.Table{Family: 4}).MayExist() && !(iptables.Table{Family: 6}).MayExist() {
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
		return errors.Join(tables[0].Remove(ctx, 0, nil), tables[1].Remove(ctx, 0, nil))
	})
}

// removeRules removes the rules from the network namespaces that paths name and that still exist.
func removeRules(cfg Config, paths []string) error {
	open := sync.OnceValues(func() ([2]iptables.Table, error) { return iptables.OpenTables(cfg.IPTables) })
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
