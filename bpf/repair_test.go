package bpf_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/bpf"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
)

// detach does what `bpftool link detach pinned PATH` does.
func detach(t *testing.T, path string) {
	t.Helper()
	l, err := link.LoadPinnedLink(path, nil)
	require.NoError(t, err)
	require.NoError(t, l.Detach())
	require.NoError(t, l.Close())
}

// everyHook has the names of the links.
var everyHook = []string{"connect4", "connect6", "getpeername4", "getpeername6", "sendmsg4", "sendmsg6", "set_out"}

func TestRepairRestoresHooksAndPins(t *testing.T) {
	for name, test := range map[string]struct {
		damage func(t *testing.T, dir string)
		lost   bool // nothing is redirected until the repair
	}{
		"links detached": {func(t *testing.T, dir string) {
			for _, name := range everyHook {
				detach(t, filepath.Join(dir, "v3", name))
			}
		}, true},
		"links detached and unpinned": {func(t *testing.T, dir string) {
			for _, name := range everyHook {
				detach(t, filepath.Join(dir, "v3", name))
				require.NoError(t, os.Remove(filepath.Join(dir, "v3", name)))
			}
		}, true},
		"links unpinned": {func(t *testing.T, dir string) {
			require.NoError(t, os.Remove(filepath.Join(dir, "v3", "connect4")))
			require.NoError(t, os.Remove(filepath.Join(dir, "v3", "connect6")))
		}, false},
		"all unpinned": {func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(dir)) }, false},
		"removed":      {func(t *testing.T, dir string) { require.NoError(t, bpf.Remove(dir)) }, true},
		"another bpffs": {func(t *testing.T, dir string) {
			require.NoError(t, unix.Mount("bpf", filepath.Dir(dir), "bpf", 0, "mode=0700"))
			t.Cleanup(func() { require.NoError(t, unix.Unmount(filepath.Dir(dir), 0)) })
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
			r := open(t, cgroup, dir)
			cookie := namespace(t)
			port, _ := listen(t)
			require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
			require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{Port: port}))
			require.NoError(t, r.Check())
			require.NoError(t, r.Repair(), "nothing to repair")
			requireRedirected(t, "before")

			test.damage(t, dir)
			if test.lost {
				requireDirect(t, "lost")
			}
			require.Error(t, r.Check())
			require.NoError(t, r.Repair())
			require.NoError(t, r.Check())
			requireAttached(t, cgroup, hooks)
			requireRedirected(t, "repaired")

			// The next agent finds everything in place.
			require.NoError(t, r.Close())
			requireRedirected(t, "without an agent")
			next := open(t, cgroup, dir)
			requireAttached(t, cgroup, hooks)
			_, ok, err := next.Pod(bpf.ByCookie(cookie))
			require.NoError(t, err)
			require.True(t, ok)
			requireRedirected(t, "by the next agent")
		})
	}
}

// TestRepairWithoutBPFFSAttachesHooks unmounts the bpffs and detaches the links.
func TestRepairWithoutBPFFSAttachesHooks(t *testing.T) {
	cgroup, fs := bpftest.Cgroup(t), t.TempDir()
	require.NoError(t, unix.Mount("bpf", fs, "bpf", 0, "mode=0700"))
	dir := filepath.Join(fs, "ctrlmesh")
	r := open(t, cgroup, dir)
	cookie := namespace(t)
	port, _ := listen(t)
	require.NoError(t, r.SetDestinations([]netip.AddrPort{service4, service6}))
	require.NoError(t, r.SetPod(bpf.ByCookie(cookie), bpf.Pod{Port: port}))
	for _, name := range []string{"connect4", "connect6"} {
		detach(t, filepath.Join(dir, "v3", name))
	}
	require.NoError(t, unix.Unmount(fs, 0))

	for range 2 {
		require.Error(t, r.Check())
		err := r.Repair()
		require.ErrorContains(t, err, "no longer than its agent")
		require.ErrorContains(t, err, "is not on a bpffs")
		requireRedirected(t, "by the programs that the agent has open")
		requireAttached(t, cgroup, hooks)
	}
	require.NoError(t, r.Close())
	requireAttached(t, cgroup, 0)
	requireDirect(t, "ended with the agent")
}

// TestRepairKeepsLinksOfNextAgent has two agents on one redirection, which repair it in turn.
func TestRepairKeepsLinksOfNextAgent(t *testing.T) {
	cgroup, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	first, second := open(t, cgroup, dir), open(t, cgroup, dir)
	detach(t, filepath.Join(dir, "v3", "connect4"))
	for _, r := range []*bpf.Redirect{second, first} {
		require.Error(t, r.Check())
		require.NoError(t, r.Repair())
		requireAttached(t, cgroup, hooks)
	}
	require.NoError(t, first.Check())
	require.NoError(t, second.Check())
}

// TestBeatReportsALapse: the beat of another process does not hide a lapse.
func TestBeatReportsALapse(t *testing.T) {
	root, dir := bpftest.Cgroup(t), filepath.Join(bpftest.BPFFS(t), "ctrlmesh")
	open := func() *bpf.Redirect {
		r, err := bpf.Open(root, dir)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close()) })
		return r
	}
	var earliest, latest time.Time // of the last beat
	beat := func(r *bpf.Redirect) (lapsed bool) {
		earliest = time.Now()
		lapsed = r.Beat()
		latest = time.Now()
		return lapsed
	}
	// inTime requires that a beat reports no lapse, unless the machine stalled.
	inTime := func(r *bpf.Redirect) {
		t.Helper()
		before := earliest
		if beat(r) {
			require.Greater(t, latest.Sub(before), patience)
		}
	}
	first := open()
	require.True(t, beat(first), "there was none before")
	inTime(first)
	early := open()
	time.Sleep(time.Until(latest.Add(patience + time.Millisecond)))
	late := open()
	require.True(t, beat(early))
	inTime(early)
	require.True(t, beat(late), "it had lapsed at Open")
	inTime(late)
}
