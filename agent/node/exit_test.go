package node

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest"
	"github.com/ctrlmesh/ctrlmesh/agent/journal"
	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	"github.com/ctrlmesh/ctrlmesh/agent/state"
	"github.com/ctrlmesh/ctrlmesh/agent/telemetry"
	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/needs"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

const uidA = "0a1b2c3d-1111-2222-3333-444455556666"

// machine is a node with one pod, in a real network namespace, for real agents
// that capture it by iptables.
type machine struct {
	dir       string
	apiserver *cachetesting.FakeControllerSource
	pid       int
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	needs.Root(t, "makes network namespaces")
	mc := &machine{dir: t.TempDir(), apiserver: cachetesting.NewFakeControllerSource()}
	cmd := exec.Command("unshare", "--net", "sh", "-c", "ip link set lo up && ip link add eth0 type veth peer name eth1 && ip address add 198.18.9.2/24 dev eth0 && ip link set eth0 up && ip link set eth1 up && ip route add default via 198.18.9.1 && echo up && exec sleep 600")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	_, err = io.ReadFull(out, make([]byte, 3))
	require.NoError(t, err, "making a network namespace")
	mc.pid = cmd.Process.Pid

	cgroup := filepath.Join(mc.dir, "cgroup/kubepods/pod"+uidA)
	proc := filepath.Join(mc.dir, "proc", fmt.Sprint(mc.pid))
	// The node's network is that of a process which never leaves it: a thread of
	// this one may, in dial.
	home := exec.Command("sleep", "600")
	require.NoError(t, home.Start())
	t.Cleanup(func() { _ = home.Process.Kill(); _ = home.Wait() })
	node := fmt.Sprint(home.Process.Pid)
	for dir, ns := range map[string]string{proc: fmt.Sprint(mc.pid), filepath.Join(mc.dir, "proc/1"): node, filepath.Join(mc.dir, "proc/self"): node} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "ns"), 0o755))
		require.NoError(t, os.Symlink("/proc/"+ns+"/ns/net", filepath.Join(dir, "ns/net")))
	}
	require.NoError(t, os.MkdirAll(cgroup, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), fmt.Appendln(nil, mc.pid), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(proc, "cgroup"), []byte("0::/kubepods/pod"+uidA+"\n"), 0o600))
	require.NoError(t, os.Symlink(fmt.Sprintf("/proc/%d/stat", mc.pid), filepath.Join(proc, "stat")))
	return mc
}

// nobody is a Manager that ignores reports.
type nobody struct{}

func (nobody) Report(*meshv1.PodReport) {}
func (nobody) Forget(string)            {}

// life is an agent on a machine.
type life struct {
	*Node
	cert *x509.Certificate // it serves with
	end  context.CancelFunc
	done chan struct{}
}

// start starts an agent as Run does, without what it needs a cluster for.
func (mc *machine) start(t *testing.T) *life {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: serial, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	server, err := proxy.New(proxy.Config{Leaf: func() (*tls.Certificate, error) { return &cert, nil }})
	require.NoError(t, err)
	logger := slog.New(slog.DiscardHandler)
	programtest.Link(t)
	needs.Program(t, "iptables")
	backend, err := capture.Open(capture.Config{Mode: capture.IPTables, PinDir: filepath.Join(mc.dir, "no-bpf"), Logger: logger})
	require.NoError(t, err)
	locator, err := pods.NewLocator(filepath.Join(mc.dir, "cgroup"), filepath.Join(mc.dir, "proc"))
	require.NoError(t, err)
	store, err := state.Open(filepath.Join(mc.dir, "policies"))
	require.NoError(t, err)

	writes, err := journal.Create(filepath.Join(mc.dir, "journal"))
	require.NoError(t, err)
	t.Cleanup(writes.Abandon)

	l := &life{done: make(chan struct{})}
	l.cert, err = x509.ParseCertificate(der)
	require.NoError(t, err)
	l.Node = New(Config{
		Locator: locator, Capture: backend, Proxy: server, Store: store, Journal: writes, Manager: nobody{}, RenewLeaf: func() {},
		Events: noEvents(), Metrics: telemetry.NewMetrics(prometheus.NewRegistry()),
		Logger: logger,
	})
	var ctx context.Context
	ctx, l.end = context.WithCancel(context.WithoutCancel(t.Context()))
	socket, err := l.TakeOver(ctx, filepath.Join(mc.dir, "run/agent.sock"))
	require.NoError(t, err)
	require.NoError(t, l.Watch(ctx, mc.apiserver))
	go func() { defer close(l.done); l.Run(ctx) }()
	go socket.Serve(ctx, l.Incumbent())
	go l.WatchHealth(ctx, socket)
	t.Cleanup(func() { l.end(); <-l.done; _ = socket.Close() })
	return l
}

// dial connects to the apiserver from the pod.
func (mc *machine) dial() (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread dies with its namespace
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", mc.pid))
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			ns.Close()
		}
		if err != nil {
			done <- result{nil, err}
			return
		}
		conn, err := net.DialTimeout("tcp4", "198.18.0.1:443", soon)
		done <- result{conn, err}
	}()
	r := <-done
	return r.conn, r.err
}

// ask makes one request from the pod on a connection of its own, and returns the
// certificate that it met.
func (mc *machine) ask() (*x509.Certificate, error) {
	conn, err := mc.dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(soon))
	client := tls.Client(conn, &tls.Config{InsecureSkipVerify: true}) // whose it is, is what is asked
	if err := client.Handshake(); err != nil {
		return nil, err
	}
	transport := &http.Transport{DialTLSContext: func(context.Context, string, string) (net.Conn, error) { return client, nil }, DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport}).Get("https://kubernetes/api")
	if err != nil {
		return nil, err
	}
	return client.ConnectionState().PeerCertificates[0], resp.Body.Close()
}

func (mc *machine) servedBy(t *testing.T, l *life) {
	t.Helper()
	cert, err := mc.ask()
	require.NoError(t, err)
	assert.True(t, cert.Equal(l.cert), "another agent answers")
}

func (mc *machine) withPod(t *testing.T) *life {
	t.Helper()
	p := podObject(uidA, v1alpha1.TrustMesh)
	mc.apiserver.Add(p)
	first := mc.start(t)
	h := handler{t.Context(), first.Node}
	require.NoError(t, h.SetCluster(somewhere(t)))
	setPolicy(t, h, &meshv1.PodPolicy{Uid: uidA, Namespace: p.Namespace, Name: p.Name, Version: "1", Refuse: "tested"})
	first.soon(t, func() bool { mb := first.pods[uidA]; return mb != nil && mb.redirection.captured != nil })
	mc.servedBy(t, first)
	return first
}

// soon waits until cond holds in the loop.
func (l *life) soon(t *testing.T, cond func() bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		ok := false
		_ = l.do(t.Context(), func() error { ok = cond(); return nil })
		return ok
	}, soon, 5*time.Millisecond)
}

func TestUpgradeRefusesNoConnection(t *testing.T) {
	mc := newMachine(t)
	agents := []*life{mc.withPod(t)}

	ctx, cancel := context.WithCancel(t.Context())
	asked, failed := 0, make(chan error, 1)
	go func() {
		defer close(failed)
		for ; ctx.Err() == nil; asked++ {
			if _, err := mc.ask(); err != nil {
				failed <- err
				return
			}
		}
	}()
	for range 3 {
		old := agents[len(agents)-1]
		agents = append(agents, mc.start(t))
		for _, c := range []chan struct{}{old.departure.yielded, old.departure.drained} {
			select {
			case <-c:
			case <-time.After(soon):
				t.Fatal("the old agent goes on")
			}
		}
		mc.servedBy(t, agents[len(agents)-1])
		require.NoError(t, old.do(t.Context(), func() error { return nil }), "the turn before this one has ended")
		assert.ErrorContains(t, old.Ready(), "taken over")
		old.end()
		<-old.done
		mc.servedBy(t, agents[len(agents)-1])
	}
	cancel()
	require.NoError(t, <-failed)
	assert.NotZero(t, asked)
	last := agents[len(agents)-1]
	last.soon(t, func() bool { return last.pods[uidA].redirection.proxied.Version() == "1" })
	last.soon(t, func() bool { return last.version(last.pods[uidA]) == "1" })
	journals, err := os.ReadDir(filepath.Join(mc.dir, "journal"))
	require.NoError(t, err)
	require.Len(t, journals, 1, "of the agents before, none has anything in flight")
}

// After a crash, or a hang that lasted too long to ask, nobody hands anything over.
func TestHungAgentYieldsToSuccessor(t *testing.T) {
	mc := newMachine(t)
	first := mc.withPod(t)
	awake := make(chan struct{})
	hangs := make(chan struct{})
	go func() { _ = first.do(t.Context(), func() error { close(hangs); <-awake; return nil }) }()
	<-hangs

	second := mc.start(t)

	mc.servedBy(t, second)
	close(awake)
	select {
	case <-first.departure.yielded:
	case <-time.After(soon):
		t.Fatal("it never noticed")
	}
	first.end()
	<-first.done
	mc.servedBy(t, second)
}
