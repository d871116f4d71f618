package address

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/manager/apiserver"
	"github.com/ctrlmesh/ctrlmesh/manager/controllers"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// resolver is a Controller with a table of names in place of DNS.
type resolver struct {
	*Controller
	names map[string][]netip.Addr
	now   time.Time
}

func newResolver(t *testing.T, addresses string) *resolver {
	t.Helper()
	r := &resolver{Controller: &Controller{State: &controllers.State{}}, names: map[string][]netip.Addr{}, now: time.Unix(0, 0)}
	r.Now = func() time.Time { return r.now }
	r.Lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		if ip, err := netip.ParseAddr(host); err == nil {
			return []netip.Addr{ip}, nil
		}
		if ips, ok := r.names[host]; ok {
			return ips, nil
		}
		return nil, errors.New("no such host")
	}
	settings, err := platform.Parse(map[string]string{platform.Key: "apiserver: {addresses: " + addresses + "}"})
	require.NoError(t, err)
	r.State.Settings.Store(settings)
	return r
}

func (r *resolver) at() (out []string) {
	for _, a := range r.State.Additional.Load().At {
		out = append(out, a.String())
	}
	return out
}

func ips(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestAddressesAreResolved(t *testing.T) {
	r := newResolver(t, "[api.example.com, 'api.example.com:6443', '192.0.2.9:8443']")
	r.names["api.example.com"] = ips("::ffff:192.0.2.1", "fd00::1", "127.0.0.1", "169.254.169.254")
	require.NoError(t, r.Reconcile(t.Context()))
	require.Equal(t, []string{"192.0.2.1:443", "192.0.2.1:6443", "192.0.2.9:8443", "[fd00::1]:443", "[fd00::1]:6443"}, r.at())
	require.Equal(t, []string{"192.0.2.9", "api.example.com"}, r.State.Additional.Load().Hosts)
}

// Without additional addresses the policies need not wait.
func TestNothingToResolve(t *testing.T) {
	r := newResolver(t, "[]")
	require.NoError(t, r.Reconcile(t.Context()))
	require.True(t, r.State.Additional.Load().Equal(&apiserver.Additional{}))
}

// A client may connect to where a name led a while ago.
func TestFormerAddressesStayAWhile(t *testing.T) {
	r := newResolver(t, "[api.example.com]")
	r.names["api.example.com"] = ips("192.0.2.1")
	require.NoError(t, r.Reconcile(t.Context()))
	r.names["api.example.com"], r.now = ips("192.0.2.2"), r.now.Add(keep)
	require.NoError(t, r.Reconcile(t.Context()))
	require.Equal(t, []string{"192.0.2.1:443", "192.0.2.2:443"}, r.at())
	r.now = r.now.Add(time.Second)
	require.NoError(t, r.Reconcile(t.Context()))
	require.Equal(t, []string{"192.0.2.2:443"}, r.at())
}

func TestUnresolvedNamesKeepTheirAddresses(t *testing.T) {
	r := newResolver(t, "[api.example.com, other.example.com]")
	r.names["other.example.com"] = ips("192.0.2.3")
	require.ErrorContains(t, r.Reconcile(t.Context()), "resolving api.example.com of apiserver.addresses: no such host")
	require.Equal(t, []string{"192.0.2.3:443"}, r.at(), "the others are resolved, and nothing waits for it")
	r.names["api.example.com"] = ips("192.0.2.1")
	require.NoError(t, r.Reconcile(t.Context()))
	delete(r.names, "api.example.com")
	r.now = r.now.Add(2 * keep)
	require.Error(t, r.Reconcile(t.Context()))
	require.Equal(t, []string{"192.0.2.1:443", "192.0.2.3:443"}, r.at())
}

func TestRemovedNamesAreForgotten(t *testing.T) {
	r := newResolver(t, "[api.example.com]")
	r.names["api.example.com"] = ips("192.0.2.1")
	require.NoError(t, r.Reconcile(t.Context()))
	r.State.Settings.Store(platform.Default())
	require.NoError(t, r.Reconcile(t.Context()))
	require.Empty(t, r.at())
}

func TestAddressesOfANameAreBounded(t *testing.T) {
	r := newResolver(t, "[api.example.com]")
	for i := range 2 * maxPerName {
		r.names["api.example.com"] = append(r.names["api.example.com"], netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", i+1)))
	}
	require.NoError(t, r.Reconcile(t.Context()))
	require.Len(t, r.at(), maxPerName)
}
