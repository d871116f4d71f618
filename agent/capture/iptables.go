package capture

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"sync"

	"github.com/google/uuid"
)

// Mark is the mark (SO_MARK) of the agent's own sockets, which the rules let
// pass. It can be forged by whoever holds CAP_NET_ADMIN or CAP_NET_RAW in the
// pod's network namespace: what stops those is the mesh CA alone. BPF does not
// ask for it.
const Mark = 0x6d657368 // "mesh"

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
	return inNetNS(netns, func() error { return t.tables[0].sync(somewhere, 1, true) })
}

func (t *iptables) mode() Mode { return IPTables }

func (t *iptables) hostNetwork() error {
	return errors.New("rules hold for all of a network namespace, which under hostNetwork is the node's")
}

// lastPort is the port of an earlier agent's rules: with it they need no change.
func (t *iptables) lastPort(p *Pod) (port uint16) {
	_ = inNetNS(p.netns, func() error {
		port, _ = t.tables[0].port()
		if port == 0 {
			port, _ = t.tables[1].port()
		}
		return nil
	})
	return port
}

func (t *iptables) redirect(p *Pod) error {
	return t.sync(p, t.destinations, true)
}

func (t *iptables) setDestinations(destinations []netip.AddrPort, pods []*Pod) error {
	t.destinations = destinations
	var errs []error
	for _, p := range pods {
		if err := t.sync(p, destinations, false); err != nil {
			errs = append(errs, fmt.Errorf("pod %s: %w", p.uid, err))
		}
	}
	return errors.Join(errs...)
}

// sync makes the rules of the pod right. Rules that lead to another port are
// another agent's: they are replaced if seize, else left as they are.
func (t *iptables) sync(p *Pod, destinations []netip.AddrPort, seize bool) error {
	return t.each(p.netns, func(table natTable) error {
		err := table.sync(destinations, p.port, seize)
		if err != nil && table.family == 6 && !haveIPv6() {
			t.log.Debug("no rules for IPv6 where there is none", "pod", p.uid, "reason", err)
			return nil
		}
		return err
	})
}

func (t *iptables) release(p *Pod) error {
	return t.each(p.netns, func(table natTable) error { return table.remove(p.port) })
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
func (t *iptables) beat() {}

// check has nothing to do: a probe shows all there is.
func (t *iptables) check([]*Pod) error { return nil }

// repair has nothing to do: pods share nothing.
func (t *iptables) repair([]netip.AddrPort, []*Pod) error { return nil }

func (t *iptables) close(pods []*Pod) error {
	var errs []error
	for _, p := range pods {
		if p.failOpen {
			errs = append(errs, t.release(p))
		}
	}
	return errors.Join(errs...)
}

// forgetRules removes the rules from a network namespace, whichever agent's they are.
func forgetRules(cfg Config, netns *os.File) error {
	return inNetNS(netns, func() error {
		if !(natTable{family: 4}).mayExist() && !(natTable{family: 6}).mayExist() {
			return nil
		}
		tables, err := openNATTables(cfg.IPTables)
		if errors.Is(err, exec.ErrNotFound) {
			return nil // then there was no way to make rules either
		}
		if err != nil {
			return err
		}
		return errors.Join(tables[0].remove(0), tables[1].remove(0))
	})
}

// removeRules removes the rules from the network namespaces that paths name and that still exist.
func removeRules(cfg Config, paths []string) error {
	var errs []error
	for _, path := range paths {
		netns, err := openNetNS(path, false)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrHostNetwork) {
			continue
		}
		if err == nil {
			err = forgetRules(cfg, netns)
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
