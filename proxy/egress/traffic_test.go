package egress

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/downstream"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/relay"
)

// whole puts limits and faults in force too, and returns the store of the faults.
func (w *world) whole(m *meshv1.Traffic) *fault.Store {
	if m.Egress == nil {
		m.Egress = &meshv1.Egress{}
	}
	limits, err := limit.Compile(m, limit.NewStore(), time.Now())
	require.NoError(w, err)
	limits.Enforce(time.Now())
	store := fault.NewStore("pod")
	faults, err := fault.Compile(m, store, time.Now())
	require.NoError(w, err)
	faults.Enforce(time.Now())
	p, err := Compile(m, limits, faults)
	require.NoError(w, err)
	w.mu.Lock()
	w.policy = p
	w.mu.Unlock()
	w.server.Changed()
	return store
}

func TestLimitsCountRequestsAndConnections(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(hello200))
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.whole(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{{
		Name: "two", Key: "k", Http: []*meshv1.HttpMatch{host("api.example.com")}, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		Bucket: &meshv1.Bucket{Burst: 2, Limit: 1, IntervalNs: int64(time.Hour)},
	}, {
		Name: "once", Key: "o", Http: []*meshv1.HttpMatch{host("once.example.com")}, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
		Bucket: &meshv1.Bucket{Burst: 1, IntervalNs: int64(time.Hour)},
	}, {
		Name: "shut", Key: "s", Http: []*meshv1.HttpMatch{host("other.example.com")}, Trigger: meshv1.Trigger_TRIGGER_FORCE_OPENED,
	}}}}})
	c := w.client(plainAt)
	code, _ := w.get(c, "http://api.example.com/")
	require.Equal(t, 200, code)
	_, err := w.client(secureAt).Get("https://api.example.com/")
	require.NoError(t, err)
	resp, err := c.Get("http://api.example.com/")
	require.NoError(t, err)
	b, _ := io.ReadAll(resp.Body)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 429, resp.StatusCode)
	require.NotEmpty(t, resp.Header.Get("Retry-After"))
	require.JSONEq(t, `{"message":"rule \"two\" of CircuitBreaker ns/cb allows no more requests at this rate: try again in 3600 s"}`, string(b))
	_, err = w.client(secureAt).Get("https://api.example.com/")
	require.ErrorContains(t, err, "access denied")
	code, _ = w.get(c, "http://other.example.com/")
	require.Equal(t, 503, code)
	code, _ = w.get(c, "http://third.example.com/")
	require.Equal(t, 200, code)
	code, _ = w.get(c, "http://once.example.com/")
	require.Equal(t, 200, code)
	resp, err = c.Get("http://once.example.com/")
	require.NoError(t, err)
	b, _ = io.ReadAll(resp.Body)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 429, resp.StatusCode)
	require.Empty(t, resp.Header.Get("Retry-After"))
	require.Contains(t, string(b), "raise bucket.limit")
	require.Subset(t, w.got(), []string{"http limited", "tls limited", "http opened", "http passed"})
}

// In pods that trust the mesh's CA, limits count the requests within TLS, which is
// decrypted only for such rules.
func TestLimitsCountDecryptedRequests(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200), func(s *httptest.Server) {
		s.TLS.Certificates = []tls.Certificate{*w.serversCA.Leaf("api.example.com", "plain.example.com", "port.example.com", "free.example.com")}
	})
	limited := func(name string, m *meshv1.HttpMatch) *meshv1.LimitRule {
		return &meshv1.LimitRule{Name: name, Key: name, Http: []*meshv1.HttpMatch{m}, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
			Bucket: &meshv1.Bucket{Burst: 2, Limit: 1, IntervalNs: int64(time.Hour)}}
	}
	forced := func(name string, by meshv1.Trigger, m *meshv1.HttpMatch) *meshv1.LimitRule {
		return &meshv1.LimitRule{Name: name, Key: name, Http: []*meshv1.HttpMatch{m}, Trigger: by}
	}
	w.whole(&meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: true}, Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
		limited("two", host("api.example.com")),
		limited("plain", &meshv1.HttpMatch{Scheme: "http", Host: exactly("plain.example.com"), Path: exactly("/x")}),
		limited("port", &meshv1.HttpMatch{Host: exactly("port.example.com"), Port: 8443}),
		forced("shut", meshv1.Trigger_TRIGGER_FORCE_OPENED, host("shut.example.com")),
		forced("free", meshv1.Trigger_TRIGGER_FORCE_CLOSED, host("free.example.com")),
		limited("any", &meshv1.HttpMatch{Host: startsWith("free.")}), // decides about none
	}}}})
	c := w.client(secureAt)
	for _, expected := range []int{200, 200, 429} {
		code, _ := w.get(c, "https://api.example.com/")
		require.Equal(t, expected, code)
	}
	for _, name := range []string{"plain", "port", "free"} {
		resp, err := c.Get("https://" + name + ".example.com/")
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		_, err = resp.TLS.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: w.server.Roots})
		require.NoError(t, err, "%s is not opened", name)
	}
	_, err := c.Get("https://shut.example.com/")
	require.ErrorContains(t, err, "access denied")
	require.Equal(t, []string{"https passed", "https passed", "https limited", "tls passed", "tls passed", "tls passed", "tls opened"}, w.got())
}

// A tunnel is cut if a new rule counts the requests within it.
func TestNewRequestLimitCutsTunnels(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	c := w.client(secureAt)
	w.whole(&meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: true}})
	for _, name := range []string{"api", "other"} {
		code, _ := w.get(c, "https://"+name+".example.com/")
		require.Equal(t, 200, code)
	}
	w.whole(&meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: true}, Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
		{Name: "some", Key: "some", Http: []*meshv1.HttpMatch{host("api.example.com")}, MaxInFlight: 1},
	}}}})
	require.Eventually(t, func() bool { return w.conns.Open.Taken() == 1 }, soon, time.Millisecond, "the other goes on")
	code, _ := w.get(w.client(secureAt), "https://api.example.com/") // the one before may not have noticed yet
	require.Equal(t, 200, code)
	require.Equal(t, []string{"tls passed", "tls passed", "https passed"}, w.got())
}

// ForceOpened cuts what is in progress, as an intercept rule does. Breakers that open
// because of counts do not.
func TestForceOpenedCutsConnectionsInProgress(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	waiting := make(chan struct{})
	w.backend(plainAt, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		waiting <- struct{}{}
		<-r.Context().Done()
	}))
	force := func(by meshv1.Trigger) {
		w.whole(&meshv1.Traffic{Breakers: []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{
			{Name: "host", Key: "host", Trigger: by, Http: []*meshv1.HttpMatch{host("api.example.com")}},
			{Name: "agent", Key: "agent", Trigger: by, UserAgents: []string{"go*"}, Http: []*meshv1.HttpMatch{host("plain.example.com")}},
			{Name: "none", Key: "none", MaxInFlight: 1, Http: []*meshv1.HttpMatch{host("other.example.com")}},
		}}}})
	}
	force(meshv1.Trigger_TRIGGER_FORCE_CLOSED)
	for _, name := range []string{"api", "other"} {
		code, _ := w.get(w.client(secureAt), "https://"+name+".example.com/")
		require.Equal(t, 200, code)
	}
	ended := make(chan error, 1)
	go func() {
		r, _ := http.NewRequest("GET", "http://plain.example.com/", nil)
		r.Header.Set("User-Agent", "go")
		_, err := w.client(plainAt).Do(r)
		ended <- err
	}()
	<-waiting
	require.EqualValues(t, 3, w.conns.Open.Taken())
	force(meshv1.Trigger_TRIGGER_FORCE_OPENED)
	require.Eventually(t, func() bool { return w.conns.Open.Taken() == 1 }, soon, time.Millisecond)
	require.Error(t, <-ended)
	require.Contains(t, w.got(), "http cut")
}

// Limits of the host of a CONNECT count the requests within it, for any server name. Without
// a server name they count the connection.
func TestLimitsMatchTargetsOfForwardProxies(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.backend(proxyAt, forwardProxy(w))
	one := func(name string) *meshv1.LimitRule {
		return &meshv1.LimitRule{Name: name, Key: name, Http: []*meshv1.HttpMatch{host(name)}, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
			Bucket: &meshv1.Bucket{Burst: 1, Limit: 1, IntervalNs: int64(time.Hour)}}
	}
	w.whole(&meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: true}, Breakers: []*meshv1.Breaker{{Name: "cb",
		Intercepts: []*meshv1.InterceptRule{deny(host("evil.example.com"))},
		Rules:      []*meshv1.LimitRule{one("api.example.com"), one("192.0.2.7")},
	}}})
	client := func(config func(*tls.Config)) *http.Client {
		return w.client(proxyAt, func(t *http.Transport) {
			t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy:3128"})
			t.ProxyConnectHeader = http.Header{"Proxy-Authorization": {"Basic b"}}
			config(t.TLSClientConfig)
		})
	}
	c := client(func(c *tls.Config) { c.ServerName = "other.example.com" })
	for _, expected := range []int{200, 429} {
		r, err := http.NewRequest("GET", "https://api.example.com/", nil)
		require.NoError(t, err)
		r.Host = "other.example.com"
		resp, err := c.Do(r)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, expected, resp.StatusCode)
	}
	nameless := func(c *tls.Config) { c.InsecureSkipVerify = true }
	code, _ := w.get(client(nameless), "https://192.0.2.7/")
	require.Equal(t, 200, code)
	_, err := client(nameless).Get("https://192.0.2.7/")
	require.ErrorContains(t, err, "access denied")
	require.Contains(t, w.got(), "tls limited")
}

func TestFaultsApplyToRequestsAndConnections(t *testing.T) {
	w := newWorld(t)
	w.backend(plainAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, strings.Repeat("x", 1000)) }))
	w.backend(secureAt, http.HandlerFunc(hello200))
	rule := func(host, key string, f *meshv1.FaultRule) *meshv1.FaultRule {
		f.Name, f.Key, f.Http = key, key, []*meshv1.HttpMatch{{Host: exactly(host)}}
		return f
	}
	w.whole(&meshv1.Traffic{Injections: []*meshv1.Injection{{Name: "fi", Rules: []*meshv1.FaultRule{
		rule("delay", "delay", &meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: int64(50 * time.Millisecond), Percent: 100}}),
		rule("abort", "abort", &meshv1.FaultRule{Abort: &meshv1.Abort{Status: 418, Percent: 100}}),
		rule("reset.example.com", "reset", &meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 100}}),
		rule("late", "late", &meshv1.FaultRule{Reset_: &meshv1.Reset{Percent: 100, AfterAnswer: true}}),
		rule("cut", "cut", &meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 10, Percent: 100}}),
		rule("slow", "slow", &meshv1.FaultRule{SlowBody: &meshv1.SlowBody{BytesPerSecond: 5000, Percent: 100}}),
	}}}})
	c := w.client(plainAt)
	start := time.Now()
	code, _ := w.get(c, "http://delay/")
	require.Equal(t, 200, code)
	require.Greater(t, time.Since(start), 50*time.Millisecond)
	code, body := w.get(c, "http://abort/")
	require.Equal(t, 418, code)
	require.Contains(t, body, "FaultInjection ns/fi/abort")
	for _, host := range []string{"reset.example.com", "late"} {
		_, err := c.Post("http://"+host+"/", "text/plain", nil)
		require.ErrorIs(t, err, syscall.ECONNRESET, host)
	}
	_, err := w.client(secureAt).Get("https://reset.example.com/")
	require.ErrorIs(t, err, syscall.ECONNRESET)
	resp, err := c.Get("http://cut/")
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.LessOrEqual(t, len(b), 10)
	start = time.Now()
	code, body = w.get(c, "http://slow/")
	require.Equal(t, 200, code)
	require.Len(t, body, 1000)
	require.Greater(t, time.Since(start), 80*time.Millisecond)
}

// In pods that trust the mesh's CA, faults apply to single requests within TLS.
func TestFaultsApplyToDecryptedRequests(t *testing.T) {
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(rw, strings.Repeat("x", 1000)) }), func(s *httptest.Server) {
		s.TLS.Certificates = []tls.Certificate{*w.serversCA.Leaf("cut", "other.example.com", "third.example.com")}
	})
	w.backend(proxyAt, forwardProxy(w))
	rule := func(name string, f *meshv1.FaultRule) *meshv1.FaultRule {
		f.Name, f.Key, f.Http = name, name, []*meshv1.HttpMatch{host(name)}
		return f
	}
	abort := func() *meshv1.FaultRule { return &meshv1.FaultRule{Abort: &meshv1.Abort{Status: 418, Percent: 100}} }
	faults := func(decrypt bool) {
		w.whole(&meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: decrypt}, Injections: []*meshv1.Injection{{Name: "fi", Rules: []*meshv1.FaultRule{
			rule("api.example.com", abort()), rule("192.0.2.7", abort()),
			rule("cut", &meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 10, Percent: 100}}),
			rule("other.example.com", &meshv1.FaultRule{Delay: &meshv1.Delay{FixedNs: 1, Percent: 100}}),
		}}}})
	}
	var mu sync.Mutex
	var injected []string
	w.server.Injected = func(i fault.Injected) {
		mu.Lock()
		defer mu.Unlock()
		injected = append(injected, i.Rule+" "+i.Kind.String())
	}
	c := w.client(secureAt)
	through := func(config func(*tls.Config)) *http.Client {
		return w.client(proxyAt, func(t *http.Transport) {
			t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy:3128"})
			t.ProxyConnectHeader = http.Header{"Proxy-Authorization": {"Basic b"}}
			config(t.TLSClientConfig)
		})
	}

	faults(false)
	_, err := c.Get("https://api.example.com/")
	require.ErrorContains(t, err, "access denied", "an answer, though not that one")
	require.Equal(t, []string{"tls fault"}, w.got())
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.Equal(injected, []string{"api.example.com abort"})
	}, soon, time.Millisecond)

	faults(true)
	code, body := w.get(c, "https://api.example.com/")
	require.Equal(t, 418, code)
	require.Contains(t, body, "FaultInjection ns/fi/api.example.com")
	resp, err := c.Get("https://cut/")
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.Error(t, err)
	require.Len(t, b, 10)
	code, _ = w.get(c, "https://other.example.com/")
	require.Equal(t, 200, code)
	require.Subset(t, w.got(), []string{"https fault", "tls passed"}, "of what waits no more is seen")

	// The host of the CONNECT counts for any server name.
	r, err := http.NewRequest("GET", "https://api.example.com/", nil)
	require.NoError(t, err)
	r.Host = "third.example.com"
	resp, err = through(func(c *tls.Config) { c.ServerName = "third.example.com" }).Do(r)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 418, resp.StatusCode)
	_, err = through(func(c *tls.Config) { c.InsecureSkipVerify = true }).Get("https://192.0.2.7/")
	require.ErrorContains(t, err, "access denied")
}

// A CONNECT and its opaque tunnel are one: a rule about its host
// applies to the CONNECT, or to the answer through it, and counts both as one.
func TestFaultRulesMatchTunnelsOnce(t *testing.T) {
	delay := &meshv1.Delay{FixedNs: 1, Percent: 100}
	cut := &meshv1.Truncate{AfterBytes: 10, Percent: 100}
	for name, test := range map[string]struct {
		rule    *meshv1.FaultRule
		within  string // the name of TLS
		decrypt bool
		state   string // matched and injected, after two connections
		fails   bool   // the first of them
	}{
		"delay":                       {rule: &meshv1.FaultRule{Delay: delay}, within: "api.example.com", state: "2 2"},
		"delay, without a name":       {rule: &meshv1.FaultRule{Delay: delay}, state: "2 2"},
		"delay, by another name":      {rule: &meshv1.FaultRule{Delay: delay}, within: "other.example.com", state: "2 2"},
		"delay of any host":           {rule: &meshv1.FaultRule{Delay: delay, Http: []*meshv1.HttpMatch{{}}}, within: "other.example.com", state: "2 2"},
		"delay of both hosts":         {rule: &meshv1.FaultRule{Delay: delay, Http: []*meshv1.HttpMatch{host("other.example.com"), host("api.example.com")}}, within: "other.example.com", state: "2 2"},
		"truncate, for any host":      {rule: &meshv1.FaultRule{Truncate: cut, Count: 1, Http: []*meshv1.HttpMatch{{}}}, within: "other.example.com", state: "2 1", fails: true},
		"delay, of a pod that trusts": {rule: &meshv1.FaultRule{Delay: delay}, within: "api.example.com", decrypt: true, state: "2 2"},
		"delay of what is decrypted":  {rule: &meshv1.FaultRule{Delay: delay, SlowBody: &meshv1.SlowBody{BytesPerSecond: 1 << 30, Percent: 100}}, within: "api.example.com", decrypt: true, state: "2 2"},
		"abort":                       {rule: &meshv1.FaultRule{Abort: &meshv1.Abort{Status: 418, Percent: 100}, Count: 1}, within: "api.example.com", state: "2 1", fails: true},
		"truncate":                    {rule: &meshv1.FaultRule{Truncate: cut, Count: 1}, within: "api.example.com", state: "2 1", fails: true},
		"truncate, too late":          {rule: &meshv1.FaultRule{Truncate: &meshv1.Truncate{AfterBytes: 1 << 30, Percent: 100}, Count: 1}, within: "api.example.com", state: "2 0"},
		"delay and truncate":          {rule: &meshv1.FaultRule{Delay: delay, Truncate: cut, Count: 1}, within: "api.example.com", state: "2 1", fails: true},
		"reset after the answer":      {rule: &meshv1.FaultRule{Reset_: &meshv1.Reset{AfterAnswer: true, Percent: 100}, Count: 1}, state: "2 1", fails: true},
		"what is about more than CONNECT shows": {rule: &meshv1.FaultRule{Delay: delay, Http: []*meshv1.HttpMatch{
			{Host: exactly("api.example.com"), Path: exactly("/")}, {Host: exactly("api.example.com"), Methods: []string{"CONNECT"}},
		}}, within: "api.example.com", state: "0 0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.backend(secureAt, http.HandlerFunc(hello200))
			w.backend(proxyAt, forwardProxy(w))
			traffic := &meshv1.Traffic{Egress: &meshv1.Egress{Decrypt: test.decrypt}, Injections: []*meshv1.Injection{{Name: "fi", Rules: []*meshv1.FaultRule{test.rule}}}}
			test.rule.Name, test.rule.Key = "rule", "rule"
			switch {
			case test.within == "": // that is about any host
				test.rule.Http = []*meshv1.HttpMatch{{}}
				traffic.Breakers = []*meshv1.Breaker{{Name: "cb", Rules: []*meshv1.LimitRule{{
					Name: "two", Key: "two", Http: test.rule.Http, Trigger: meshv1.Trigger_TRIGGER_LIMITER_ONLY,
					Bucket: &meshv1.Bucket{Burst: 2, Limit: 1, IntervalNs: int64(time.Hour)},
				}}}}
			case test.rule.Http == nil:
				test.rule.Http = []*meshv1.HttpMatch{host("api.example.com")}
			}
			store := w.whole(traffic)
			c := w.client(proxyAt, func(t *http.Transport) {
				t.Proxy = http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy:3128"})
				t.ProxyConnectHeader = http.Header{"Proxy-Authorization": {"Basic b"}}
				t.DisableKeepAlives = true
				name := cmp.Or(test.within, "192.0.2.7") // an address is no server name
				t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true, ServerName: name}
			})
			for i := range 2 {
				resp, err := c.Get("https://api.example.com/")
				require.Equal(t, test.fails && i == 0, err != nil, "%v", err)
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
				}
			}
			state := func() string {
				s := store.States()[0]
				return fmt.Sprint(s.GetMatched(), " ", s.GetInjected())
			}
			// Missed faults are not counted in the end.
			require.Eventually(t, func() bool { return state() == test.state }, soon, time.Millisecond, state())
		})
	}
}

func TestCurl(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("no curl")
	}
	w := newWorld(t)
	w.backend(secureAt, http.HandlerFunc(hello200))
	w.set(strict(&meshv1.Egress{}, allow(host("api.example.com"))))
	at := w.redirect(secureAt)
	run := func(name string) (string, error) {
		b, err := exec.CommandContext(t.Context(), curl, "-sSk", "--noproxy", "*", "--connect-to", name+":443:"+at, "https://"+name+"/x").CombinedOutput()
		return string(b), err
	}
	out, err := run("api.example.com")
	require.NoError(t, err, out)
	require.Contains(t, out, "api.example.com /x")
	out, err = run("other.example.com")
	require.Error(t, err)
	require.Contains(t, strings.ToLower(out), "denied")
}

// bench compares a tunnel with a plain relay.
func bench(b *testing.B, run func(b *testing.B, at string)) {
	echo := tcptest.Serve(b, func(c net.Conn) { _, _ = io.Copy(c, c) })
	b.Run("plain", func(b *testing.B) {
		front := tcptest.Serve(b, func(down net.Conn) {
			up, err := net.Dial("tcp", echo)
			if err == nil {
				relay.Both(down, up, downstream.TunnelIdle)
				up.Close()
			}
		})
		run(b, front)
	})
	b.Run("egress", func(b *testing.B) {
		w := newWorld(b)
		w.backends[otherAt] = echo
		var many []*meshv1.HttpMatch
		for i := range 100 {
			many = append(many, host(fmt.Sprintf("h%d.example.com", i)))
		}
		w.set(rules(&meshv1.Egress{}, deny(many...)))
		run(b, w.redirect(otherAt))
	})
}

func BenchmarkThroughput(b *testing.B) {
	bench(b, func(b *testing.B, at string) {
		c, err := net.Dial("tcp", at)
		require.NoError(b, err)
		defer c.Close()
		const piece = 1 << 20
		b.SetBytes(piece)
		out, in := make([]byte, piece), make([]byte, piece)
		for b.Loop() {
			go func() { _, _ = c.Write(out) }()
			_, err := io.ReadFull(c, in)
			require.NoError(b, err)
		}
	})
}

func BenchmarkConnection(b *testing.B) {
	hello := hellos(b)["ALPN"]
	bench(b, func(b *testing.B, at string) {
		in := make([]byte, len(hello))
		b.ReportAllocs()
		for b.Loop() {
			c, err := net.Dial("tcp", at)
			require.NoError(b, err)
			_, err = c.Write(hello)
			require.NoError(b, err)
			_, err = io.ReadFull(c, in)
			require.NoError(b, err)
			c.Close()
		}
	})
}

func BenchmarkParseHello(b *testing.B) {
	hello := hellos(b)["ALPN"]
	b.ReportAllocs()
	for b.Loop() {
		_, _, _ = parseHello(hello)
	}
}
