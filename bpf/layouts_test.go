package bpf_test

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

// oldLayouts are released layouts, each with its programs in testdata.
var oldLayouts = []string{"v1", "v2"}

// older is what an agent of an earlier layout has open: the programs that were released
// with it, and its maps.
type older struct {
	Connect4     *ebpf.Program `ebpf:"connect4"`
	Connect6     *ebpf.Program `ebpf:"connect6"`
	Pods         *ebpf.Map     `ebpf:"pods"`
	Destinations *ebpf.Map     `ebpf:"destinations"`
	AgentSockets *ebpf.Map     `ebpf:"agent_sockets"`
}

// openOlder does what agents of an earlier layout did.
func openOlder(t *testing.T, layout, cgroup, parent string) *older {
	t.Helper()
	dir := filepath.Join(parent, layout)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	spec, err := ebpf.LoadCollectionSpec("testdata/redirect_" + layout + ".o")
	require.NoError(t, err)
	a := &older{}
	require.NoError(t, spec.LoadAndAssign(a, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}))
	t.Cleanup(func() {
		require.NoError(t, errors.Join(a.Pods.Close(), a.Destinations.Close(), a.AgentSockets.Close()))
	})
	for name, hook := range map[string]link.CgroupOptions{
		"connect4": {Path: cgroup, Attach: ebpf.AttachCGroupInet4Connect, Program: a.Connect4},
		"connect6": {Path: cgroup, Attach: ebpf.AttachCGroupInet6Connect, Program: a.Connect6},
	} {
		l, err := link.AttachCgroup(hook)
		require.NoError(t, err)
		require.NoError(t, l.Pin(filepath.Join(dir, name)))
		require.NoError(t, errors.Join(l.Close(), hook.Program.Close()))
	}
	return a
}

// setPod redirects a pod. A value is its uid and its port.
func (a *older) setPod(cookie uint64, uid byte, port uint16) error {
	return a.Pods.Put(cookie, append([]byte{uid, 15: 0}, byte(port), byte(port>>8), 0, 0))
}

func (a *older) setDestination(to netip.AddrPort) error {
	address := to.Addr().As16()
	return a.Destinations.Put(append(address[:], byte(to.Port()), byte(to.Port()>>8), 0, 0), uint8(1))
}

func (a *older) markSocket(fd int) error { return a.AgentSockets.Put(int32(fd), uint8(1)) }

func TestUpgradeFromAnotherLayout(t *testing.T) {
	for _, layout := range oldLayouts {
		t.Run(layout, func(t *testing.T) { testUpgrade(t, layout) })
	}
}

func testUpgrade(t *testing.T, layout string) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	old := openOlder(t, layout, cgroup, dir)
	cookie := namespace(t)
	oldPort, oldStop := listen(t)
	newPort, newStop := listen(t)
	require.NoError(t, old.setDestination(service4))
	require.NoError(t, old.setDestination(service6))
	require.NoError(t, old.setPod(cookie, 1, oldPort))
	require.NoError(t, old.setPod(cookie+1, 2, oldPort))
	requireRedirected(t, "by the old agent")

	r := open(t, cgroup, dir)
	bothPass := func() {
		t.Helper()
		_, err := client{prepare: old.markSocket}.connect(service4)
		require.ErrorIs(t, err, unix.ENETUNREACH, "socket of the old agent")
		_, err = client{prepare: r.MarkSocket}.connect(service4)
		require.ErrorIs(t, err, unix.ENETUNREACH, "socket of the new agent")
	}
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	requireRedirected(t, "still by the old agent")
	bothPass()
	all := func([16]byte) bool { return true }
	require.NoError(t, r.Sweep(all))
	requireRedirected(t, "the old agent's pods are kept")

	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{UID: [16]byte{1}, Port: newPort}))
	oldStop()
	requireRedirected(t, "by the new agent")
	bothPass()
	egress, _ := listen(t)
	require.NoError(t, r.SetEgress([16]byte{1}, []uint16{elsewhere4.Port()}, nil))
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{UID: [16]byte{1}, Port: newPort, Egress: egress}))
	_, err := client{}.connect(elsewhere4)
	require.NoError(t, err, "the old layout, which knows no egress, is not in the way")

	require.NoError(t, r.Sweep(all))
	require.DirExists(t, filepath.Join(dir, layout), "there is another pod of the old agent's")
	requireAttached(t, cgroup, hooks+2)
	require.NoError(t, r.Sweep(func(uid [16]byte) bool { return uid == [16]byte{1} }))
	require.NoDirExists(t, filepath.Join(dir, layout))
	requireAttached(t, cgroup, hooks)
	requireRedirected(t, "by the new agent alone")
	bothPass()

	newStop()
	_, err = client{}.connect(service4)
	require.ErrorIs(t, err, unix.ECONNREFUSED)
}

// TestForgetAndRemoveInEveryLayout opens none of the layouts.
func TestForgetAndRemoveInEveryLayout(t *testing.T) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	require.NoError(t, bpf.Forget(dir, 1), "nothing there")
	old, first := openOlder(t, "v2", cgroup, dir), openOlder(t, "v1", cgroup, dir)
	r := open(t, cgroup, dir)
	require.NoError(t, r.SetPod(bpf.ByCookie(1), bpf.Pod{UID: [16]byte{1}}))
	require.NoError(t, old.setPod(1, 1, 1))
	require.NoError(t, first.setPod(1, 1, 1))

	require.NoError(t, bpf.Forget(dir, 1))
	_, ok, err := r.Pod(bpf.ByCookie(1))
	require.NoError(t, err)
	require.False(t, ok)
	require.ErrorIs(t, old.Pods.Lookup(uint64(1), make([]byte, 20)), ebpf.ErrKeyNotExist)
	require.ErrorIs(t, first.Pods.Lookup(uint64(1), make([]byte, 20)), ebpf.ErrKeyNotExist)

	require.NoError(t, bpf.Remove(dir))
	requireAttached(t, cgroup, 0)
	require.NoFileExists(t, dir)
}
