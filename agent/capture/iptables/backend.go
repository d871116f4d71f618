package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
	"github.com/ctrlmesh/ctrlmesh/internal/parallel"
)

const (
	// Timeout bounds all programs together that the agent's loop or other pods wait for: those
	// of a capture, of a repair, of a change of all pods' rules, and of the removal of one
	// pod's rules.
	Timeout = program.Time
	// concurrency is the number of pods whose rules are changed at once.
	concurrency = 4
)

// Backend redirects by rules in the network namespace of each pod.
type Backend struct {
	redirect.Nothing
	Tables       [2]Table // IPv4, IPv6
	log          *slog.Logger
	destinations []netip.AddrPort
}

// Open finds the programs and makes rules in a network namespace of its own: the kernel may
// reject what the programs can express.
func Open(log *slog.Logger) (*Backend, error) {
	tables, err := OpenTables()
	if err != nil {
		return nil, err
	}
	b := &Backend{Tables: tables, log: log}
	namespace, err := netns.New()
	if err != nil {
		return nil, err
	}
	defer namespace.Close()
	anywhere := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:443")}
	if err := netns.Do(namespace, func() error { return tables[0].Sync(context.Background(), anywhere, 1, nil, SyncOptions{Seize: true}) }); err != nil {
		return nil, err
	}
	return b, nil
}

// HostNetwork returns why pods under hostNetwork cannot be captured.
func (b *Backend) HostNetwork() error {
	return errors.New("rules apply to a whole network namespace, which under hostNetwork is the node's")
}

// Left returns the rules of an earlier agent: to the same ports they need no change.
func (b *Backend) Left(ctx context.Context, p redirect.Pod) (l redirect.Left) {
	_ = b.each(p.NetNS, func(i int, table Table) (err error) {
		l.Rules[i], err = table.Left(ctx)
		return err
	})
	for _, rules := range l.Rules {
		leads := leadsOf(rules)
		l.Port = cmp.Or(l.Port, leads.Port)
		if leads.Egress != 0 {
			l.Egress = &redirect.Egress{Ports: leads.Ports, Port: leads.Egress}
		}
	}
	return l
}

// Egress returns nil: connections to other hosts can be redirected.
func (b *Backend) Egress() error { return nil }

// State returns the generation of the rules in the pod's network namespace.
func (b *Backend) State(p redirect.Pod) (state uint32, known bool) {
	generation, err := p.Rules.Generation()
	return generation, err == nil
}

// Origin asks connection tracking for the address that a redirected connection was made to.
func (b *Backend) Origin(_ uint64, conn *net.TCPConn, local, _ netip.AddrPort) (netip.AddrPort, error) {
	var to netip.AddrPort
	err := descriptor.Control(conn, func(fd int) (err error) {
		to, err = originalDestination(uintptr(fd), local.Addr().Is6())
		return err
	})
	if errors.Is(err, unix.ENOENT) || err == nil && to == local {
		return netip.AddrPort{}, nil // it was made to the listener
	}
	return to, err
}

// Apply redirects the pod.
func (b *Backend) Apply(ctx context.Context, p redirect.Pod) error { return b.sync(ctx, p, true) }

// SetDestinations changes the destinations of these pods, and of those that are redirected
// later. A pod where that fails does not keep the others from it.
func (b *Backend) SetDestinations(destinations []netip.AddrPort, pods []redirect.Pod) (redirect.Failed, error) {
	b.destinations = destinations
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	return forEach(pods, func(p redirect.Pod) error { return b.sync(ctx, p, false) }), nil
}

// forEach calls f for several pods at once.
func forEach(pods []redirect.Pod, f func(redirect.Pod) error) redirect.Failed {
	failed := redirect.Failed{}
	for i, err := range parallel.Each(pods, concurrency, f) {
		if err != nil {
			failed[pods[i].UID] = err
		}
	}
	return failed
}

// sync corrects the rules of the pod. Rules that lead to another port are another agent's:
// they are replaced if seize, else they stay.
func (b *Backend) sync(ctx context.Context, p redirect.Pod, seize bool) error {
	return b.each(p.NetNS, func(i int, table Table) error {
		how := SyncOptions{Seize: seize}
		if p.Left != nil {
			how.Left = p.Left.Rules[i]
		}
		err := table.Sync(ctx, b.destinations, p.Port, p.Egress, how)
		if err != nil && table.Family == 6 && !haveIPv6() {
			b.log.Debug("no rules for IPv6, which the pod does not have", "pod", p.UID, "reason", err)
			return nil
		}
		return err
	})
}

// Release removes the rules, unless they lead to another agent.
func (b *Backend) Release(p redirect.Pod) error {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	return b.each(p.NetNS, func(_ int, table Table) error { return table.Remove(ctx, p.Port, p.Egress) })
}

// each calls f for both tables in a network namespace, concurrently: most of the time it
// waits for programs.
func (b *Backend) each(namespace *os.File, f func(i int, t Table) error) error {
	var errs [2]error
	var wg sync.WaitGroup
	for i, table := range b.Tables {
		wg.Go(func() { errs[i] = netns.Do(namespace, func() error { return f(i, table) }) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// Check returns the pods with egress whose UDP is not refused. All else a probe shows.
func (b *Backend) Check(pods []redirect.Pod) (redirect.Failed, error) {
	failed := redirect.Failed{}
	for _, p := range pods {
		if p.Egress == nil {
			continue
		}
		if err := netns.Do(p.NetNS, func() error { return refusesUDP(p.Egress.Ports[0]) }); err != nil {
			failed[p.UID] = err
		}
	}
	return failed, nil
}

// Close removes the rules of the pods that fail open, because rules apply whether or not an
// agent listens.
func (b *Backend) Close(pods []redirect.Pod) error {
	failOpen := slices.DeleteFunc(slices.Clone(pods), func(p redirect.Pod) bool { return !p.FailOpen })
	return errors.Join(slices.Collect(maps.Values(forEach(failOpen, b.Release)))...)
}

// Forget removes the rules from a network namespace, whichever agent made them. It calls
// open only if there may be some.
func Forget(namespace *os.File, open func() ([2]Table, error)) error {
	return netns.Do(namespace, func() error {
		if !(Table{Family: 4}).MayExist() && !(Table{Family: 6}).MayExist() {
			return nil
		}
		tables, err := open()
		if errors.Is(err, exec.ErrNotFound) {
			return nil // then there was no program to make rules either
		}
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), Timeout)
		defer cancel()
		return errors.Join(tables[0].Remove(ctx, 0, nil), tables[1].Remove(ctx, 0, nil))
	})
}

// ForgetAll removes the rules from the network namespaces that paths name and that still
// exist.
func ForgetAll(paths []string) error {
	open := sync.OnceValues(OpenTables)
	var errs []error
	for _, path := range paths {
		namespace, err := netns.Open(path, false)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, netns.ErrHostNetwork) {
			continue
		}
		if err == nil {
			err = Forget(namespace, open)
			namespace.Close()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing rules from %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}
