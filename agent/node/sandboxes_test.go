package node

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/nri"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
)

// capturing is a mesh that captures, by address: it takes a network namespace, and
// changes nothing in it.
func capturing(t *testing.T) *running {
	t.Helper()
	needs.Root(t, "makes network namespaces")
	r := start(t, 0)
	backend, err := capture.Open(capture.Config{Mode: capture.Address, Address: "127.0.0.1:0", PinDir: filepath.Join(t.TempDir(), "no-bpf")})
	require.NoError(t, err)
	r.in(t, func() { r.Capture = backend })
	require.NoError(t, r.SetCluster(somewhere(t)))
	return r
}

// in runs f in the loop.
func (r *running) in(t *testing.T, f func()) {
	t.Helper()
	require.NoError(t, r.do(t.Context(), func() error { f(); return nil }))
}

// look is what the loop does every second.
func (r *running) look(t *testing.T) {
	t.Helper()
	r.in(t, func() { r.capturer.checkSandboxes(); r.capturer.captureMissing() })
}

// process starts one in a network namespace of its own, which is shown as a
// process of the pod's container. It returns what ends it.
func (r *running) process(t *testing.T, container, address string) (end func()) {
	t.Helper()
	cmd := exec.Command("unshare", "--net", "sh", "-c", "ip link set lo up && ip address add "+address+"/32 dev lo && echo up && exec sleep 600")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	cgroup := filepath.Join(r.cgroups, "kubepods/pod"+uidA, container)
	end = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.RemoveAll(cgroup)
	}
	t.Cleanup(end)
	_, err = io.ReadFull(out, make([]byte, 3))
	require.NoError(t, err, "making a network namespace")

	pid := cmd.Process.Pid
	proc := filepath.Join(r.proc, fmt.Sprint(pid))
	require.NoError(t, os.MkdirAll(filepath.Join(proc, "ns"), 0o755))
	for _, file := range []string{"ns/net", "stat"} {
		require.NoError(t, os.Symlink(fmt.Sprintf("/proc/%d/%s", pid, file), filepath.Join(proc, file)))
	}
	require.NoError(t, os.WriteFile(filepath.Join(proc, "cgroup"), []byte("0::/kubepods/pod"+uidA+"/"+container+"\n"), 0o600))
	require.NoError(t, os.MkdirAll(cgroup, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), fmt.Appendln(nil, pid), 0o600))
	return end
}

func sandbox(id string) nri.Sandbox {
	return nri.Sandbox{ID: id, Pod: pods.Pod{UID: uidA, Namespace: "ns", Name: "p", Trust: v1alpha1.TrustMesh, Capture: v1alpha1.CaptureAddress}}
}

// captured is what is captured of the pod, if anything.
func (r *running) captured(t *testing.T) (c *capture.Pod, netns uint64) {
	t.Helper()
	r.in(t, func() {
		if mb := r.pods[uidA]; mb != nil {
			c, netns = mb.redirection.captured, mb.redirection.netns
		}
	})
	return c, netns
}

// The runtime also names sandboxes that have exited. No other one is to be expected of their pods.
func TestExitedSandboxesAreNotAwaited(t *testing.T) {
	r := capturing(t)
	s := sandboxes{r.Node}
	awaits := func() (awaits bool) {
		r.in(t, func() { awaits = r.capturer.awaitsSandbox() })
		return awaits
	}
	s.Synchronize(t.Context(), []nri.Sandbox{sandbox("exited")})
	require.False(t, awaits())
	s.Started(t.Context(), sandbox("next"))
	require.True(t, awaits())
}

// A pod whose sandbox was made anew has two, until the dead one is thrown away.
func TestExitOfEarlierSandboxKeepsCapture(t *testing.T) {
	for _, order := range [][]nri.Sandbox{{sandbox("live"), sandbox("dead")}, {sandbox("dead"), sandbox("live")}} {
		r := capturing(t)
		end := r.process(t, "a", "198.18.7.1")
		s := sandboxes{r.Node}
		s.Synchronize(t.Context(), order)
		before, _ := r.captured(t)
		require.Nil(t, before, "a pod that runs is not asked for its address")
		known := netip.MustParseAddr("198.18.7.1")
		for i := range order {
			order[i].Pod.Addresses = []netip.Addr{known}
		}
		s.Synchronize(t.Context(), order)
		before, _ = r.captured(t)
		require.NotNil(t, before)
		require.Equal(t, []netip.Addr{known}, before.Addresses())

		s.Stopped(t.Context(), sandbox("dead"))
		s.Stopped(t.Context(), sandbox("live")) // while its process is there: it is not true
		r.look(t)

		after, _ := r.captured(t)
		assert.Same(t, before, after)

		end()
		s.Started(t.Context(), sandbox("next"))
		r.process(t, "b", "198.18.7.1")
		r.look(t)
		after, _ = r.captured(t)
		require.NotNil(t, after)
		assert.NotSame(t, before, after, "a sandbox made anew is captured")
	}
}

func TestSandboxExitReleasesPod(t *testing.T) {
	r := capturing(t)
	end := r.process(t, "a", "198.18.7.2")
	s := sandboxes{r.Node}
	s.Started(t.Context(), sandbox("live"))
	c, _ := r.captured(t)
	require.NotNil(t, c)

	end()
	r.look(t)
	c, _ = r.captured(t)
	require.NotNil(t, c, "between two containers, a pod may have no process")
	s.Stopped(t.Context(), sandbox("live"))

	c, _ = r.captured(t)
	assert.Nil(t, c)
}

func TestProcessInAnotherNetworkKeepsCapture(t *testing.T) {
	r := capturing(t)
	end := r.process(t, "b", "198.18.7.3")
	sandboxes{r.Node}.Started(t.Context(), sandbox("live"))
	before, first := r.captured(t)
	require.NotNil(t, before)

	r.process(t, "a", "198.18.7.4") // seen first
	r.look(t)
	after, _ := r.captured(t)
	assert.Same(t, before, after)

	end()
	r.look(t)
	_, second := r.captured(t)
	assert.NotEqual(t, first, second, "nobody is left in the first")
	assert.NotZero(t, second)
}

// The API may say that a pod is gone which runs on.
func TestDeletedPodIsRefusedWhileItRuns(t *testing.T) {
	for _, open := range []bool{false, true} {
		r := capturing(t)
		end := r.process(t, "a", "198.18.7.5")
		p := podObject(uidA, v1alpha1.TrustMesh)
		p.Annotations[v1alpha1.CaptureAnnotation] = v1alpha1.CaptureAddress
		p.Status.PodIPs = []corev1.PodIP{{IP: "198.18.7.5"}}
		r.create(t, p)
		r.soon(t, "the capture", func() bool { return r.pods[uidA] != nil && r.pods[uidA].redirection.captured != nil })
		setPolicy(t, r, &meshv1.PodPolicy{Uid: uidA, Version: "1", Namespace: "ns", Name: p.Name, FailOpen: open})
		r.apiserver.Delete(p)
		r.soon(t, "the refusal", func() bool { return r.pods[uidA].deleted() })
		r.in(t, func() {
			mb := r.pods[uidA]
			assert.NotNil(t, mb.redirection.captured)
			assert.Equal(t, "1", mb.redirection.proxied.Version(), "a refusal of all is within the policy")
		})
		r.create(t, p) // the list was behind
		r.soon(t, "its policy", func() bool { mb := r.pods[uidA]; return !mb.deleted() && mb.redirection.proxied.Version() == "1" })

		r.apiserver.Delete(p)
		r.soon(t, "the refusal", func() bool { return r.pods[uidA].deleted() })
		end()
		r.soon(t, "its end", func() bool { return r.pods[uidA] == nil })
	}
}

func TestResumeAppliesPoliciesOfFailedTakeover(t *testing.T) {
	r := capturing(t)
	r.process(t, "a", "198.18.7.6")
	sandboxes{r.Node}.Started(t.Context(), sandbox("live"))
	setPolicy(t, r, &meshv1.PodPolicy{Uid: uidA, Version: "1", Namespace: "ns", Name: "p", FailOpen: true})
	old := r.Incumbent()
	_, err := old.Offer(t.Context())
	require.NoError(t, err)
	setPolicy(t, r, &meshv1.PodPolicy{Uid: uidA, Version: "2", Namespace: "ns", Name: "p"})
	elsewhere := somewhere(t)
	elsewhere.Version, elsewhere.EndpointAddresses = "2", []string{"198.18.0.3:6443"}
	require.NoError(t, r.SetCluster(elsewhere))

	require.NoError(t, old.Resume(t.Context()))

	r.in(t, func() {
		assert.True(t, r.destinations.redirected)
		assert.False(t, r.pods[uidA].redirection.failOpen)
		cluster, saved, err := r.Store.Load()
		require.NoError(t, err)
		assert.Equal(t, "2", cluster.GetVersion())
		require.Len(t, saved, 1)
		assert.Equal(t, "2", saved[0].GetVersion())
	})
}
