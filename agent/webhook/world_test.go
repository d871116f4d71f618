package webhook

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/inbound"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/internal/netnstest"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/bpf/bpftest"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/proxy"
	"github.com/ctrlmesh/ctrlmesh/proxy/review"
	"github.com/ctrlmesh/ctrlmesh/proxy/review/route"
)

const (
	port = 9443
	name = "hook.ns.svc" // the server name that the apiserver uses
	// soon is when what must happen has happened, however busy the machine is.
	soon = 30 * time.Second
	// signOfLifeFor is how long a sign of life of an agent is valid.
	signOfLifeFor = 2 * time.Second
)

// world is a network with the apiserver in the middle.
type world struct {
	*testing.T
	apiserver *ns
	dir       string
	node      *inbound.Node
	proxy     *proxy.Server
	registry  *prometheus.Registry
	alive     atomic.Pointer[time.Time] // before the last sign of life
}

// ns is a network namespace.
type ns struct{ *netnstest.NS }

func newNS(t testing.TB) *ns { return &ns{netnstest.New(t)} }

func (n *ns) dial(ctx context.Context, network, addr string) (c net.Conn, err error) {
	err = netns.Do(n.File, func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
		return err
	})
	return c, err
}

func newWorld(t *testing.T) *world {
	w := &world{T: t, apiserver: newNS(t), dir: filepath.Join(bpftest.BPFFS(t), "ctrlmesh"), registry: prometheus.NewRegistry()}
	require.NoError(t, netns.Do(w.apiserver.File, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o600)
	}))
	w.alive.Store(&time.Time{})
	w.agent()
	return w
}

// agent starts an agent, which takes the place of another.
func (w *world) agent() {
	var err error
	log := slog.New(slog.NewTextHandler(w.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.node, err = inbound.Open(w.dir, log)
	require.NoError(w, err)
	w.proxy, err = proxy.New(proxy.Config{
		Leaf: func() (*tls.Certificate, error) { return nil, os.ErrNotExist }, Logger: log, Registerer: w.registry,
	})
	require.NoError(w, err)
	n, ctx := w.node, w.Context()
	go func() { // as the agent's health check does
		for ctx.Err() == nil {
			now := time.Now()
			n.Beat()
			w.alive.Store(&now)
			_ = n.Check()
			time.Sleep(50 * time.Millisecond)
		}
	}()
	w.Cleanup(func() { _ = n.Close() })
}

// operator is a pod with a webhook that answers with the name of its shard.
type operator struct {
	w       *world
	ns      *ns
	shard   string
	uid     string
	address netip.Addr
	certDir string
	work    func()                // of each review
	found   func() ([]int, error) // the processes of the pod; nil: that of the test
	stop    func()

	captured *inbound.Pod
	proxied  *proxy.Pod
	routed   *Pod
}

// pod creates a pod whose webhook has a certificate.
func (w *world) pod(i byte, shard string, ca *authority, config func(*tls.Config)) *operator {
	w.Helper()
	o := &operator{w: w, ns: newNS(w), shard: shard, uid: uuid.NewString(), certDir: w.TempDir(), address: netip.AddrFrom4([4]byte{198, 18, i, 2})}
	device := "pod" + string('a'+rune(i))
	require.NoError(w, o.ns.Link.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: device, PeerNamespace: netlink.NsFd(w.apiserver.File.Fd()),
	}))
	gateway := o.address.Prev()
	w.apiserver.Up(device, netip.PrefixFrom(gateway, 24).String())
	o.ns.Up("eth0", netip.PrefixFrom(o.address, 24).String())
	l, err := o.ns.Link.LinkByName("eth0")
	require.NoError(w, err)
	require.NoError(w, o.ns.Link.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: gateway.AsSlice()}))
	if ca != nil {
		ca.issue(o.certDir, 1)
	}
	o.serve(config)
	return o
}

// serve starts the webhook. It reads its certificate for each connection.
func (o *operator) serve(config func(*tls.Config)) {
	t := o.w.T
	l := o.ns.Listen("tcp", fmt.Sprint(":", port))
	c := &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(filepath.Join(o.certDir, "tls.crt"), filepath.Join(o.certDir, "tls.key"))
		return &pair, err
	}}
	if config != nil {
		config(c)
	}
	server := &http.Server{TLSConfig: c, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var asked admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || r.Header.Get(meshv1.ForwardedHeader) != "" || r.URL.RawQuery != "timeout=10s" {
			http.Error(w, fmt.Sprint(err, r.Header, r.URL), http.StatusBadRequest)
			return
		}
		if o.work != nil {
			o.work()
		}
		answer := &admissionv1.AdmissionResponse{Allowed: true, Warnings: []string{o.shard}}
		if asked.Request != nil {
			answer.UID = asked.Request.UID
		}
		_ = json.NewEncoder(w).Encode(admissionv1.AdmissionReview{TypeMeta: asked.TypeMeta, Response: answer})
	}), ErrorLog: slog.NewLogLogger(slog.NewTextHandler(t.Output(), nil), slog.LevelInfo)}
	go func() { _ = server.ServeTLS(l, "", "") }()
	o.stop = func() { _ = server.Close() }
	t.Cleanup(o.stop)
}

// route makes the agent route the reviews that arrive at the pod.
func (o *operator) route(routes *review.Routes, files ...*os.File) {
	t := o.w.T
	var err error
	ports := []uint16(nil)
	if len(files) > 0 {
		ports = []uint16{port}
	}
	o.captured, err = o.w.node.Capture(inbound.Request{UID: o.uid, NetNS: fmt.Sprintf("/proc/self/fd/%d", o.ns.File.Fd()), Ports: ports, Files: files})
	require.NoError(t, err)
	o.proxied = o.w.proxy.Pod(proxy.PodInfo{UID: o.uid, Namespace: "ns", Name: o.shard}, o.ns.dial)
	o.proxied.Reviews().SetRoutes(routes)
	found := o.found
	if found == nil {
		found = func() ([]int, error) { return []int{os.Getpid()}, nil }
	}
	o.routed = Start(Config{
		Captured: o.captured, CertDir: o.certDir, Files: make(chan struct{}, 1), Port: port, Addresses: func(context.Context) []netip.Addr { return []netip.Addr{o.address} }, Steered: len(files) > 0,
		Processes: found, Owns: func(int) (bool, error) { return true, nil },
		Server: o.proxied.Reviews(), Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	stop := o.routed.Stop
	t.Cleanup(stop)
}

// requireRouted waits until the agent terminates the pod's connections.
func (o *operator) requireRouted() {
	o.w.Helper()
	require.Eventually(o.w, func() bool { return o.routed.Problem() == nil }, soon, 10*time.Millisecond)
}

// routes returns the routes of a pod of a shard: namespace a is that of one, b that of two.
func routes(shard string, ca *authority, pods ...*operator) *review.Routes {
	r := &review.Routes{
		Routes: route.Routes{
			Shard: shard, Default: "two",
			Owners: []route.Owner{{Shard: "one", Scope: sharding.Keys("a")}, {Shard: "two", Scope: sharding.Keys("b")}},
		},
		Pods: map[string][]netip.Addr{},
	}
	if ca != nil {
		r.Authorities = map[string]*x509.CertPool{name: ca.pool}
	}
	for _, p := range pods {
		r.Pods[p.shard] = append(r.Pods[p.shard], p.address)
	}
	return r
}

// client is how the apiserver calls webhooks.
func (w *world) client(ca *authority, http2 bool) *http.Client {
	t := &http.Transport{
		DialContext: w.apiserver.dial, TLSClientConfig: &tls.Config{RootCAs: ca.pool, ServerName: name}, ForceAttemptHTTP2: http2,
	}
	w.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: soon}
}

// ask sends a review about a namespace to a pod, and returns which shard answered.
func ask(c *http.Client, o *operator, namespace string) (shard string, err error) {
	uid := types.UID(uuid.NewString())
	return send(c, o, uid, &admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{Kind: "AdmissionReview", APIVersion: "admission.k8s.io/v1"},
		Request: &admissionv1.AdmissionRequest{
			UID: uid, Kind: metav1.GroupVersionKind{Version: "v1", Kind: "ConfigMap"},
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"},
			Name:     "x", Namespace: namespace, Operation: admissionv1.Create,
		},
	})
}

func send(c *http.Client, o *operator, uid types.UID, body any) (shard string, err error) {
	encoded, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	resp, err := c.Post(fmt.Sprintf("https://%s/mutate?timeout=10s", netip.AddrPortFrom(o.address, port)), "application/json", bytes.NewReader(encoded))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s: %w", resp.Status, got, err)
	}
	var answer admissionv1.AdmissionReview
	if err := json.Unmarshal(got, &answer); err != nil {
		return "", err
	}
	if answer.Response.UID != uid || !answer.Response.Allowed {
		return "", fmt.Errorf("not the answer to review %s: %s", uid, got)
	}
	if len(answer.Response.Warnings) == 0 {
		return "mesh", nil
	}
	return answer.Response.Warnings[0], nil
}

// requireAnswer requires that a shard answers a review about a namespace.
func (w *world) requireAnswer(want string, c *http.Client, o *operator, namespace string) {
	w.Helper()
	got, err := ask(c, o, namespace)
	require.NoError(w, err)
	require.Equal(w, want, got)
}

// authority issues certificates to webhooks.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	a := &authority{t: t, cert: cert, key: key, pool: x509.NewCertPool()}
	a.pool.AddCert(cert)
	return a
}

// issue writes a certificate and its key in a directory, as the kubelet does: by a rename of
// a link to both.
func (a *authority) issue(dir string, serial int64) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	require.NoError(a.t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(a.t, err)
	generation := fmt.Sprint("..", serial)
	require.NoError(a.t, os.MkdirAll(filepath.Join(dir, generation), 0o700))
	for file, block := range map[string]*pem.Block{
		"tls.crt": {Type: "CERTIFICATE", Bytes: cert}, "tls.key": {Type: "PRIVATE KEY", Bytes: private},
	} {
		require.NoError(a.t, os.WriteFile(filepath.Join(dir, generation, file), pem.EncodeToMemory(block), 0o600))
		if serial == 1 {
			require.NoError(a.t, os.Symlink(filepath.Join("..data", file), filepath.Join(dir, file)))
		}
	}
	require.NoError(a.t, os.Symlink(generation, filepath.Join(dir, "..data_tmp")))
	require.NoError(a.t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
}
