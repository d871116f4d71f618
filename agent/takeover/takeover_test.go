package takeover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
)

// agent is one that serves real listeners.
type agent struct {
	mu        sync.Mutex
	listeners []*net.TCPListener
	fail      error
	podStart  time.Duration
	drained   chan struct{}
	heard     chan string
	traffic   map[string][]byte
}

func newAgent() *agent { return &agent{heard: make(chan string, 16)} }

func (a *agent) say(what string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.heard <- what
	return a.fail
}

func (a *agent) MayTakeOver(podStart time.Duration) error {
	if podStart < a.podStart {
		return errors.New("too old")
	}
	return nil
}

func (a *agent) Offer(context.Context) ([]Pod, error) {
	if err := a.say("offer"); err != nil {
		return nil, err
	}
	var pods []Pod
	for i, l := range a.listeners {
		f, err := l.File()
		if err != nil {
			return nil, err
		}
		pods = append(pods, Pod{UID: fmt.Sprint(i), Namespace: "ns", Name: fmt.Sprint("pod-", i), Journaled: i%2 == 0, Files: &capture.Files{Listeners: []*os.File{f}}})
	}
	return pods, nil
}

func (a *agent) Yield(context.Context) (<-chan struct{}, error) {
	for _, l := range a.listeners {
		_ = l.Close()
	}
	return a.drained, a.say("yield")
}
func (a *agent) Traffic(context.Context) map[string][]byte { return a.traffic }
func (a *agent) Resume(context.Context) error              { return a.say("resume") }
func (a *agent) Stop(context.Context) error                { return a.say("stop") }

// serve makes an agent the one that is asked at path.
// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

func serve(t *testing.T, path string, a *agent) *Socket {
	t.Helper()
	s, err := Listen(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.NoError(t, s.Take())
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(t.Context(), a) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return s
}

func (a *agent) hears(t *testing.T, what string) {
	t.Helper()
	select {
	case said := <-a.heard:
		require.Equal(t, what, said)
	case <-time.After(soon):
		t.Fatalf("never asked to %s", what)
	}
}

func listener(t *testing.T) *net.TCPListener {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestTakeoverRefusesNoConnection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dir", "sock")
	first := newAgent()
	const pods = 300 // three messages
	for range pods {
		first.listeners = append(first.listeners, listener(t))
	}
	serve(t, path, first)
	accept := func(l net.Listener) {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("."))
			_ = c.Close()
		}
	}
	for _, l := range first.listeners {
		go accept(l)
	}
	addresses := make([]string, pods)
	for i, l := range first.listeners {
		addresses[i] = l.Addr().String()
	}
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	asked := 0
	go func() {
		defer close(failed)
		for ; ctx.Err() == nil; asked++ {
			c, err := net.Dial("tcp", addresses[asked%pods])
			if err == nil {
				_, err = c.Read(make([]byte, 1))
				_ = c.Close()
			}
			if err != nil {
				failed <- err
				return
			}
		}
	}()

	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	require.Len(t, offer.Pods, pods)
	for i, p := range offer.Pods {
		require.Equal(t, fmt.Sprint(i), p.UID)
		require.Equal(t, "ns", p.Namespace)
		require.Equal(t, i%2 == 0, p.Journaled)
		l, err := net.FileListener(p.Files.Listeners[0])
		require.NoError(t, err)
		require.Equal(t, addresses[i], l.Addr().String(), "each pod has its own")
		t.Cleanup(func() { _ = l.Close() })
		go accept(l)
	}
	Close(offer.Pods)
	_, err = offer.Serving()
	require.NoError(t, err)

	first.hears(t, "offer")
	first.hears(t, "yield")
	for _, at := range addresses { // the other's alone now
		c, err := net.Dial("tcp", at)
		require.NoError(t, err)
		_ = c.Close()
	}
	cancel()
	require.NoError(t, <-failed)
	assert.NotZero(t, asked)
}

func TestPredecessorReportsDrained(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := newAgent()
	first.drained = make(chan struct{})
	serve(t, path, first)
	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	_, err = offer.Serving()
	require.NoError(t, err)
	select {
	case <-offer.Drained:
		t.Fatal("it has requests under way")
	default:
	}
	close(first.drained)
	select {
	case <-offer.Drained:
	case <-time.After(soon):
		t.Fatal("it never said so")
	}
}

// A listener that is offered must not become a blocking one: its agent could not stop
// accepting any more.
func TestOfferedListenersCanBeClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := newAgent()
	first.listeners = []*net.TCPListener{listener(t)}
	serve(t, path, first)
	ended := make(chan error)
	go func() { _, err := first.listeners[0].Accept(); ended <- err }()

	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	Close(offer.Pods)
	_, err = offer.Serving()
	require.NoError(t, err)

	select {
	case err := <-ended:
		assert.ErrorIs(t, err, net.ErrClosed)
	case <-time.After(soon):
		t.Fatal("it still accepts")
	}
}

func TestPredecessorResumesWhenSuccessorDies(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := newAgent()
	first.listeners = []*net.TCPListener{listener(t)}
	serve(t, path, first)
	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	first.hears(t, "offer")

	offer.Close()

	first.hears(t, "resume")
	again, err := Ask(t.Context(), path, 0)
	require.NoError(t, err, "another may ask")
	Close(again.Pods)
	_, err = again.Serving()
	require.NoError(t, err)
}

func TestAskWithoutAnAgentIsNoError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	assert.Nil(t, offer)
	require.NoError(t, Stop(t.Context(), path))

	require.NoError(t, serve(t, path, newAgent()).Close()) // a socket that a dead agent left
	offer, err = Ask(t.Context(), path, 0)
	require.NoError(t, err)
	assert.Nil(t, offer)
}

func TestHungAgentIsNotAwaited(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	hangs, err := Listen(path, slog.New(slog.DiscardHandler)) // and does not accept
	require.NoError(t, err)
	require.NoError(t, hangs.Take())
	defer hangs.Close()

	_, err = Ask(t.Context(), path, 0)

	require.Error(t, err)
	assert.NotErrorIs(t, err, ErrRefused)
	assert.True(t, hangs.Current())
	serve(t, path, newAgent())
	assert.False(t, hangs.Current(), "it knows when it wakes up")
}

func TestStopIsAnsweredOnceItIsDone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := newAgent()
	serve(t, path, first)
	require.NoError(t, Stop(t.Context(), path))
	first.hears(t, "stop")

	first.mu.Lock()
	first.fail = errors.New("a rule stayed")
	first.mu.Unlock()
	assert.ErrorContains(t, Stop(t.Context(), path), "a rule stayed")
}

func TestUnknownMessagesAndFieldsAreTolerated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := newAgent()
	serve(t, path, first)
	ask := func(message string) string {
		conn, err := net.Dial(network, path)
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Write([]byte(message))
		require.NoError(t, err)
		b := make([]byte, maxMessage)
		_ = conn.SetReadDeadline(time.Now().Add(soon))
		n, _ := conn.Read(b)
		return string(b[:n])
	}

	assert.JSONEq(t, `{"error":"unknown request \"dance\""}`, ask(`{"ask":"dance"}`), "which refuses nothing")
	assert.Empty(t, ask(`not JSON`))
	assert.JSONEq(t, `{}`, ask(`{"ask":"stop","gently":true}`))
	first.hears(t, "stop")
}

// An offer that says more listeners than it brings must not give a pod another's.
func TestOfferWithoutItsListenersIsRejected(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	require.NoError(t, err)
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = conn.Read(make([]byte, maxMessage))
		_, _ = conn.Write([]byte(`{"pods":[{"uid":"a","handed":true,"listeners":2}]}`))
	}()
	_, err = Ask(t.Context(), path, 0)
	assert.ErrorContains(t, err, "listeners are missing")
}

// An agent of another version says more, or less, than this one knows of.
func TestOffersOfOtherVersionsAreUnderstood(t *testing.T) {
	for name, says := range map[string][]string{
		"newer": {
			`{"pods":[{"uid":"a","namespace":"ns","name":"x","version":"1","traffic":"e30=","more":{"b":[1]}}],"phase":"new","format":9}`,
			`{"more":true,"format":9}`, `{"pods":[{"uid":"a","traffic":"e30=","piece":1}],"format":9}`,
		},
		"older": {`{"pods":[{"uid":"a","namespace":"ns","name":"x","version":"1","traffic":"e30="}]}`, `{}`},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "sock")
			l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
			require.NoError(t, err)
			defer l.Close()
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				for i, message := range says {
					if i < 2 { // each answers a question
						_, _ = conn.Read(make([]byte, maxMessage))
					}
					_, _ = conn.Write([]byte(message))
				}
			}()
			offer, err := Ask(t.Context(), path, 0)
			require.NoError(t, err)
			assert.Equal(t, []Pod{{UID: "a", Namespace: "ns", Name: "x", Version: "1", Traffic: []byte("{}")}}, offer.Pods)
			traffic, err := offer.Serving()
			require.NoError(t, err)
			if name == "newer" {
				assert.Equal(t, map[string][]byte{"a": []byte("{}")}, traffic)
			}
			<-offer.Drained
		})
	}
}

// The container of an old pod may start anew while its successor serves.
func TestOlderAgentIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	there, err := Probe(t.Context(), path, 1)
	require.NoError(t, err)
	assert.False(t, there)
	first := newAgent()
	first.podStart = 2
	socket := serve(t, path, first)

	there, err = Probe(t.Context(), path, 1)
	assert.True(t, there)
	require.ErrorIs(t, err, ErrRefused)
	_, err = Ask(t.Context(), path, 1)
	require.ErrorIs(t, err, ErrRefused)
	assert.ErrorContains(t, err, "too old")
	assert.Empty(t, first.heard, "it was asked for nothing")

	_, err = Probe(t.Context(), path, 3)
	require.NoError(t, err)
	offer, err := Ask(t.Context(), path, 3)
	require.NoError(t, err)
	offer.Close()

	require.NoError(t, os.Remove(path))
	assert.False(t, socket.Current(), "what was taken away is nobody's")
}

func TestSocketThatIsNotTakenChangesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := serve(t, path, newAgent())
	next, err := Listen(path, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	assert.True(t, first.Current())
	require.NoError(t, next.Close())
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	assert.Len(t, entries, 1, "nothing is left of it")
}

// TestListenersForEgressArePassedOn sends more of them than fit in one message.
func TestListenersForEgressArePassedOn(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var peers [2]peer
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "peer")
		conn, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		defer conn.Close()
		peers[i] = peer{conn.(*net.UnixConn)}
	}
	const pods = 130
	var sent []Pod
	var inodes [][4]string
	for i := range pods {
		var files [4]*os.File
		var inode [4]string
		for j := range files {
			r, w, err := os.Pipe()
			require.NoError(t, err)
			require.NoError(t, w.Close())
			files[j] = r
			inode[j], err = os.Readlink(fmt.Sprint("/proc/self/fd/", r.Fd()))
			require.NoError(t, err)
		}
		inodes = append(inodes, inode)
		offered := &capture.Files{Listeners: files[:2], Inbound: files[2:3], Egress: files[3:]}
		if i%10 == 0 { // one without
			closeAll(files[2:])
			offered.Egress, offered.Inbound = nil, nil
		}
		sent = append(sent, Pod{UID: fmt.Sprint(i), Files: offered})
	}
	done := make(chan error, 1)
	go func() { done <- peers[0].sendPods(sent) }()
	got, err := peers[1].receivePods()
	require.NoError(t, err)
	require.NoError(t, <-done)
	Close(sent)
	defer Close(got)
	require.Len(t, got, pods)
	for i, pod := range got {
		require.Equal(t, fmt.Sprint(i), pod.UID)
		require.Len(t, pod.Files.Listeners, 2)
		require.Len(t, pod.Files.Egress, map[bool]int{true: 0, false: 1}[i%10 == 0])
		require.Len(t, pod.Files.Inbound, len(pod.Files.Egress))
		for j, f := range slices.Concat(pod.Files.Listeners, pod.Files.Inbound, pod.Files.Egress) {
			is, err := os.Readlink(fmt.Sprint("/proc/self/fd/", f.Fd()))
			require.NoError(t, err)
			require.Equal(t, inodes[i][j], is)
		}
	}
}

func TestCountsOfRulesAreSentLast(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	first := newAgent()
	first.traffic = map[string][]byte{"a": []byte("some"), "b": bytes.Repeat([]byte("much"), piece), "c": nil}
	serve(t, path, first)
	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	traffic, err := offer.Serving()
	require.NoError(t, err)
	require.Equal(t, map[string][]byte{"a": first.traffic["a"], "b": first.traffic["b"]}, traffic)
	<-offer.Drained
}

// Agents of before rules, on either side.
func TestAgentWithoutRulesIsTakenOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	require.NoError(t, err)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		for _, answer := range []string{`{"pods":[{"uid":"a"}]}`, `{}`} {
			_, _ = conn.Read(make([]byte, maxMessage))
			_, _ = conn.Write([]byte(answer))
		}
		_ = conn.Close()
	}()
	offer, err := Ask(t.Context(), path, 0)
	require.NoError(t, err)
	traffic, err := offer.Serving()
	require.NoError(t, err)
	require.Empty(t, traffic)
	<-offer.Drained
	require.NoError(t, l.Close())
	require.NoError(t, os.RemoveAll(path))

	first := newAgent()
	first.traffic, first.drained = map[string][]byte{"a": bytes.Repeat([]byte("much"), piece)}, make(chan struct{})
	serve(t, path, first)
	p, err := dial(t.Context(), path)
	require.NoError(t, err)
	defer p.conn.Close()
	require.NoError(t, p.send(message{Ask: takeOver}))
	_, err = p.receivePods()
	require.NoError(t, err)
	require.NoError(t, p.send(message{Ask: serving}))
	_, err = p.next()
	require.NoError(t, err, "which is all that it waits for")
	close(first.drained)
	require.Eventually(t, func() bool { _, err := p.next(); return err != nil }, soon, time.Millisecond)
}

// Namespaces and names may be long, and the apiserver may have a node with many such pods.
func TestPodsWithLongNamesNeedSeveralMessages(t *testing.T) {
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(t.TempDir(), "sock"), Net: network})
	require.NoError(t, err)
	defer l.Close()
	sent := make([]Pod, 500)
	for i := range sent {
		sent[i] = Pod{UID: fmt.Sprint(i), Namespace: strings.Repeat("n", 63), Name: strings.Repeat("p", 253), Version: strings.Repeat("v", 70), Traffic: make([]byte, 500)}
	}
	go func() {
		conn, err := l.AcceptUnix()
		if err == nil {
			_ = peer{conn}.sendPods(sent)
			_ = conn.Close()
		}
	}()
	p, err := dial(t.Context(), l.Addr().String())
	require.NoError(t, err)
	got, err := p.receivePods()
	require.NoError(t, err)
	require.Equal(t, sent, got)
}

func TestManyCountsNeedSeveralMessages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	pair := make([]Pod, 50)
	for i := range pair {
		pair[i] = Pod{UID: fmt.Sprint(i), Traffic: bytes.Repeat([]byte("x"), 10_000)}
	}
	pair[7].Traffic = bytes.Repeat([]byte("x"), 1<<20)
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	require.NoError(t, err)
	defer l.Close()
	go func() {
		conn, err := l.AcceptUnix()
		if err == nil {
			_ = peer{conn}.sendPods(pair)
			_ = conn.Close()
		}
	}()
	p, err := dial(t.Context(), path)
	require.NoError(t, err)
	got, err := p.receivePods()
	require.NoError(t, err)
	require.Len(t, got, len(pair))
	require.Nil(t, got[7].Traffic, "it is sent later")
	require.Len(t, got[8].Traffic, 10_000)
}
