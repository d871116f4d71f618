package admit

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// patience is how long a condition is awaited.
const patience = 30 * time.Second

var (
	hostile   = netip.MustParseAddr("10.0.0.1")
	neighbour = netip.MustParseAddr("10.0.0.2")
	quiet     = slog.New(slog.DiscardHandler)
)

// endless is a body that is read until it is aborted.
type endless struct {
	size    int // that it has before it stalls
	aborted chan struct{}
	reached chan struct{} // closed once it stalls
}

func newEndless(size int) *endless {
	return &endless{size: size, aborted: make(chan struct{}), reached: make(chan struct{})}
}

func (e *endless) Read(p []byte) (int, error) {
	if e.size > 0 {
		n := min(len(p), e.size)
		e.size -= n
		return n, nil
	}
	close(e.reached)
	<-e.aborted
	return 0, errors.New("aborted")
}

func (e *endless) abort() { close(e.aborted) }

func TestStalledBodiesStayWithinTheTotal(t *testing.T) {
	b := &Bodies{Each: 7 << 20, Total: maxReviews}
	for range 20 {
		body := newEndless(6 << 20)
		ended := make(chan error, 1)
		go func() {
			_, _, err := b.Read(hostile, 0, body, body.abort)
			ended <- err
		}()
		select {
		case <-body.reached:
		case err := <-ended:
			require.ErrorIs(t, err, errEvicted)
		}
	}
	b.mu.Lock()
	assert.LessOrEqual(t, b.bytes, b.Total)
	b.mu.Unlock()

	t.Run("and a neighbour's is read", func(t *testing.T) {
		content, release, err := b.Read(neighbour, 0, strings.NewReader(strings.Repeat("x", 7<<20)), func() { t.Error("the neighbour's body was dropped") })
		require.NoError(t, err)
		assert.Len(t, content, 7<<20)
		release()
		b.mu.Lock()
		defer b.mu.Unlock()
		assert.NotContains(t, b.peers, neighbour)
	})
}

func TestBodyAboveItsBoundIsRefused(t *testing.T) {
	b := &Bodies{Each: 10, Total: 100}
	_, _, err := b.Read(hostile, 0, strings.NewReader(strings.Repeat("x", 11)), func() {})
	require.ErrorIs(t, err, errTooLarge)
	assert.Zero(t, b.bytes)
	assert.Empty(t, b.peers)
}

// HTTP/2 connections have many requests at once, whose bodies need not come.
func TestHeadsOfOnePeerStayWithinTheTotal(t *testing.T) {
	const head = 32 << 10
	b := &Bodies{Each: 7 << 20, Total: maxReviews}
	for range 2 * maxReviews / head {
		body := newEndless(0)
		abort := sync.OnceFunc(body.abort)
		t.Cleanup(abort)
		go func() { _, _, _ = b.Read(hostile, head, body, abort) }()
	}
	require.Eventually(t, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.peers[hostile]) == maxReviews/head
	}, patience, time.Millisecond)
	content, release, err := b.Read(neighbour, head, strings.NewReader("x"), func() { t.Error("the neighbour's body was dropped") })
	require.NoError(t, err)
	require.Equal(t, "x", string(content))
	release()
}

func TestShareOfOnePeerIsNotAnothers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Share{Total: 3, PerPeer: 2}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		first, err := s.Acquire(ctx, hostile, 2)
		require.NoError(t, err)
		waited := make(chan error, 1)
		go func() {
			_, err := s.Acquire(ctx, hostile, 1)
			waited <- err
		}()
		synctest.Wait()
		release, err := s.Acquire(ctx, neighbour, 1)
		require.NoError(t, err)
		release()
		select {
		case err := <-waited:
			require.Fail(t, "a request above its peer's part did not wait", "%v", err)
		default:
		}
		first()
		require.NoError(t, <-waited)
	})
}

func TestShareEndsWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Share{Total: 1, PerPeer: 1}
		release, err := s.Acquire(t.Context(), hostile, 1)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for _, peer := range []netip.Addr{hostile, neighbour} {
			_, err = s.Acquire(ctx, peer, 1)
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		release()
		assert.Empty(t, s.peers)
	})
}

// serve serves a handler on loopback, with the bounds of webhooks.
func serve(t *testing.T, port Port, handler http.Handler, config *tls.Config) (address string) {
	t.Helper()
	l, err := port.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	address = l.Addr().String()
	if config != nil {
		l = tls.NewListener(l, config)
	}
	server := port.Server(handler, quiet)
	t.Cleanup(func() { _ = server.Close() })
	go func() { _ = server.Serve(l) }()
	return address
}

// Twenty bodies of 7 MiB that stall once made the manager store 174 MB.
func TestStalledReviewsCostLittleMemory(t *testing.T) {
	address := serve(t, Webhooks, NewReviews(http.NotFoundHandler(), quiet), nil)
	before := heap()
	for range 20 {
		c, err := net.Dial("tcp", address)
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		_, err = c.Write([]byte("POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 7340032\r\n\r\n"))
		require.NoError(t, err)
		require.NoError(t, c.SetWriteDeadline(time.Now().Add(patience)))
		_, _ = c.Write(make([]byte, 7<<20-1)) // fails once the body is dropped
	}
	assert.Less(t, heap()-before, int64(4*maxReviews))
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestReviewsReachTheHandler(t *testing.T) {
	echo := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		assert.Equal(t, netip.MustParseAddr("127.0.0.1"), PeerOf(r.Context()))
		_, deadline := r.Context().Deadline()
		assert.True(t, deadline)
		_, _ = w.Write(body)
	})
	address := serve(t, Webhooks, NewReviews(echo, quiet), nil)
	post := func(body string) (int, string) {
		resp, err := http.Post("http://"+address+"/x", "application/json", strings.NewReader(body))
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		content, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(content)
	}
	code, body := post(`{"a": 1}`)
	assert.Equal(t, http.StatusOK, code)
	assert.JSONEq(t, `{"a": 1}`, body)

	t.Run("but not with more objects than can be decoded", func(t *testing.T) {
		code, _ := post("[" + strings.Repeat("{},", 40_000) + "{}]")
		assert.Equal(t, http.StatusRequestEntityTooLarge, code)
	})
	t.Run("nor above the size", func(t *testing.T) {
		code, _ := post(strings.Repeat("x", maxReview+1))
		assert.Equal(t, http.StatusRequestEntityTooLarge, code)
	})
	t.Run("nor by another method", func(t *testing.T) {
		resp, err := http.Get("http://" + address + "/x")
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusMethodNotAllowed, resp.StatusCode)
	})
	t.Run("nor with large headers", func(t *testing.T) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/x", nil)
		require.NoError(t, err)
		req.Header.Set("X", strings.Repeat("x", 2*maxHeaders))
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusRequestHeaderFieldsTooLarge, resp.StatusCode)
	})
}

// Whatever the elements of a list are, the decoder makes as many containers of them.
func TestElementsWeighWhatTheyDecodeTo(t *testing.T) {
	const n = 50_000
	for element, most := range map[string]int64{"{}": 1, "null": 1, "0": 1, "[]": 1, "[null]": 1, `""`: 4} {
		t.Run(element, func(t *testing.T) {
			body := []byte(`{"spec": {"containers": [` + strings.Repeat(element+", ", n-1) + element + `]}}`)
			before := heap()
			pod := &corev1.Pod{}
			_ = json.Unmarshal(body, pod) // an element of another kind is an error at the end
			require.Len(t, pod.Spec.Containers, n)
			require.LessOrEqual(t, heap()-before, most*weigh(body))
			runtime.KeepAlive(pod)
		})
	}
}

func TestWeightOfReviews(t *testing.T) {
	for body, elements := range map[string][2]int64{
		`{"a": 1}`:                 {1, 1},
		`{"a": {"b": [], "c":{}}}`: {4, 3},
		`["a", "b,{[", "\"[,"]`:    {1, 3},
		`[1, null,true , [{}]]`:    {6, 0},
	} {
		// Enough of them to exceed the smallest weight.
		const times = 10_000
		want := times * (int64(len(body)) + elements[0]*perElement + elements[1]*perText)
		require.Equal(t, want, weigh([]byte(strings.Repeat(body, times))), body)
	}
}

// A configuration that lists as many names as it may, twice, is judged.
func TestLongListsOfTextsAreNotTooHeavy(t *testing.T) {
	list := `["` + strings.Repeat(`namespace-1", "`, 2*(768<<10)/len(`namespace-1", "`)) + `"]`
	require.LessOrEqual(t, weigh([]byte(list)), int64(maxDecodingPerPeer))
}

func TestScrapesOfOnePeerAreBounded(t *testing.T) {
	release, entered := make(chan struct{}), make(chan struct{}, 10)
	h := Scrapes(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		entered <- struct{}{}
		<-release
	}))
	get := func(peer netip.Addr) (code int) {
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), peerKey{}, peer))
		defer cancel()
		recorder := httptest.NewRecorder()
		h.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil).WithContext(ctx))
		return recorder.Code
	}
	for range 2 {
		go get(hostile)
		<-entered
	}
	third := make(chan int, 1)
	go func() { third <- get(hostile) }()
	go get(neighbour)
	<-entered // the neighbour's, while the third waits
	close(release)
	assert.Equal(t, http.StatusOK, <-third)
}

// counted counts what reaches the apiserver.
type counted struct {
	client.Reader
	lists int
}

func (c *counted) List(context.Context, client.ObjectList, ...client.ListOption) error {
	c.lists++
	return nil
}

// list lists through a Reader as a webhook that reviews what a peer sends about a namespace.
func list(t *testing.T, r *Reader, peer netip.Addr, namespace string) error {
	var err error
	WithNamespace(admission.HandlerFunc(func(ctx context.Context, _ admission.Request) admission.Response {
		err = r.List(ctx, nil)
		return admission.Response{}
	})).Handle(context.WithValue(t.Context(), peerKey{}, peer), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Namespace: namespace}})
	return err
}

// All tenants' reviews come from one peer, the apiserver.
func TestReadsAboutOneNamespaceAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := &counted{}
		r := NewReader(inner)
		for range 10 * readsPerNamespaceBurst {
			_ = list(t, r, neighbour, "hostile")
		}
		assert.Equal(t, readsPerNamespaceBurst, inner.lists)
		require.NoError(t, list(t, r, neighbour, "other"))

		time.Sleep(time.Second)
		require.NoError(t, list(t, r, neighbour, "hostile"))
	})
}

// A pod can send reviews about namespaces that it invents.
func TestReadsOfOnePeerAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := &counted{}
		r := NewReader(inner)
		for i := range 10 * readsPerPeerBurst {
			_ = list(t, r, hostile, strconv.Itoa(i))
		}
		assert.Equal(t, readsPerPeerBurst, inner.lists)
		require.NoError(t, list(t, r, neighbour, "other"))

		time.Sleep(time.Second)
		require.NoError(t, list(t, r, hostile, "other"))
	})
}

func TestLimitersOfManyPeersAreForgotten(t *testing.T) {
	r := NewReader(&counted{})
	r.total = rate.NewLimiter(rate.Inf, 0)
	for i := range 3 * maxLimiters {
		require.NoError(t, list(t, r, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), ""))
		require.LessOrEqual(t, r.peers.Len(), maxLimiters)
		require.LessOrEqual(t, r.namespaces.Len(), maxLimiters)
	}
}

// authority signs client certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return authority{cert, key}
}

func (a authority) issue(t *testing.T, name string, usage x509.ExtKeyUsage) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, a.cert, key.Public(), a.key)
	require.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestClientCertificates(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.crt")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw}), 0o600))
	serving := ca.issue(t, "manager", x509.ExtKeyUsageServerAuth)
	config := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &serving, nil }}
	clients := &Clients{CAFile: file, Names: []string{"apiserver"}, Log: quiet}
	require.NoError(t, clients.Configure(config))
	address := serve(t, Webhooks, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), config)

	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	request := func(certs ...tls.Certificate) error {
		c := &http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "localhost", Certificates: certs}}}
		resp, err := c.Post("https://"+address, "application/json", bytes.NewReader(nil))
		if err != nil {
			return err
		}
		return resp.Body.Close()
	}
	require.NoError(t, request(ca.issue(t, "apiserver", x509.ExtKeyUsageClientAuth)))
	for name, certs := range map[string][]tls.Certificate{
		"none":       nil,
		"another CA": {other.issue(t, "apiserver", x509.ExtKeyUsageClientAuth)},
		"name":       {ca.issue(t, "somebody", x509.ExtKeyUsageClientAuth)},
		"usage":      {ca.issue(t, "apiserver", x509.ExtKeyUsageServerAuth)},
	} {
		t.Run(name, func(t *testing.T) { require.Error(t, request(certs...)) })
	}
	t.Run("a CA that replaces another", func(t *testing.T) {
		require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other.cert.Raw}), 0o600))
		clients.mu.Lock()
		clients.read = time.Time{}
		clients.mu.Unlock()
		require.NoError(t, request(other.issue(t, "apiserver", x509.ExtKeyUsageClientAuth)))
		require.Error(t, request(ca.issue(t, "apiserver", x509.ExtKeyUsageClientAuth)))
	})
	t.Run("a missing file", func(t *testing.T) {
		require.Error(t, (&Clients{CAFile: file + ".none", Log: quiet}).Configure(&tls.Config{}))
	})
}
