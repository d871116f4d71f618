// Package address resolves where clients reach the apiserver beside its Service.
package address

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

const (
	every   = 30 * time.Second
	timeout = 5 * time.Second // for all names
	// keep is how long an address counts that a name no longer resolves to: clients cache names,
	// and the addresses of a load balancer may take turns.
	keep = 10 * time.Minute
	// maxPerName bounds the addresses of a name.
	maxPerName = 32
)

// Controller resolves the addresses of the administrator's settings.
type Controller struct {
	Lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	Now    func() time.Time
	State  *controllers.State

	// seen is when each address was last among those of a name.
	seen map[platform.Address]map[netip.Addr]time.Time
}

// Spec implements controllers.Reconciler.
func (c *Controller) Spec() controllers.Spec {
	return controllers.Spec{
		Name: "addresses", Reconcile: c.Reconcile, Debounce: controllers.DebounceEvents, Resync: every,
		On: []controllers.Source{c.State.Settings.When(otherAddresses)},
	}
}

// otherAddresses reports whether the apiserver's addresses have changed.
func otherAddresses(before, after *platform.Settings) bool {
	return before == nil || !slices.Equal(before.APIServer.Addresses, after.APIServer.Addresses)
}

// Reconcile resolves all names. Those that do not resolve keep the addresses that they had.
func (c *Controller) Reconcile(ctx context.Context) error {
	settings := c.State.Settings.Load().APIServer
	answers := c.resolve(ctx, settings.Addresses)
	seen := map[platform.Address]map[netip.Addr]time.Time{}
	var errs []error
	for i, name := range settings.Addresses {
		seen[name] = c.seen[name]
		if err := answers[i].err; err != nil {
			errs = append(errs, fmt.Errorf("resolving %s of %s: %w", name.Host, platform.APIServerAddresses, err))
			continue
		}
		seen[name] = merge(c.seen[name], answers[i].ips, c.Now())
	}
	c.seen = seen
	metrics.UnresolvedAddresses.Set(float64(len(errs)))
	c.publish(settings.Hosts())
	return errors.Join(errs...)
}

type answer struct {
	ips []netip.Addr
	err error
}

func (c *Controller) resolve(ctx context.Context, names []platform.Address) []answer {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answers := make([]answer, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { answers[i].ips, answers[i].err = c.Lookup(ctx, "ip", name.Host) })
	}
	wg.Wait()
	return answers
}

// merge returns what counts as the addresses of a name that was just resolved.
func merge(before map[netip.Addr]time.Time, resolved []netip.Addr, now time.Time) map[netip.Addr]time.Time {
	out := maps.Clone(before)
	if out == nil {
		out = map[netip.Addr]time.Time{}
	}
	maps.DeleteFunc(out, func(_ netip.Addr, last time.Time) bool { return now.Sub(last) > keep })
	for _, ip := range resolved {
		ip = ip.Unmap().WithZone("")
		// Loopback and link-local addresses are never the apiserver's, whatever a name resolves to.
		if _, known := out[ip]; (known || len(out) < maxPerName) && ip.IsGlobalUnicast() {
			out[ip] = now
		}
	}
	return out
}

// publish publishes the addresses if they have changed.
func (c *Controller) publish(hosts []string) {
	next := &apiserver.Additional{Hosts: hosts}
	for name, ips := range c.seen {
		for ip := range ips {
			next.At = append(next.At, netip.AddrPortFrom(ip, name.Port))
		}
	}
	slices.SortFunc(next.At, netip.AddrPort.Compare)
	next.At = slices.Compact(next.At)
	if before := c.State.Additional.Load(); before == nil || !before.Equal(next) {
		c.State.Additional.Store(next)
	}
}
