package ui

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

// browser is a browser of the user.
type browser struct {
	*testing.T
	url    string
	cookie string // the name of the session's; empty: there is no session
	host   string
}

// open returns a browser with a session, and the server.
func open(t *testing.T, c *meshtest.Cluster) (browser, *Server) {
	t.Helper()
	s := &Server{Reader: c.Reader(t), Token: "of-the-user", Poll: time.Millisecond}
	pages := httptest.NewServer(s.Handler())
	t.Cleanup(pages.Close)
	s.Hosts = []string{strings.TrimPrefix(pages.URL, "http://")}
	return browser{t, pages.URL, s.cookie(), ""}, s
}

// request requests a path. The caller closes the body.
func (b browser) request(ctx context.Context, method, path string) *http.Response {
	b.Helper()
	req, err := http.NewRequestWithContext(ctx, method, b.url+path, nil)
	require.NoError(b, err)
	if b.cookie != "" {
		req.AddCookie(&http.Cookie{Name: b.cookie, Value: "of-the-user"})
	}
	req.Host = b.host
	resp, err := http.DefaultClient.Do(req)
	require.NoError(b, err)
	return resp
}

func (b browser) get(path string) (code int, body string) {
	b.Helper()
	resp := b.request(b.Context(), http.MethodGet, path)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(b, err)
	require.NotContains(b, string(text), meshtest.SecretText)
	return resp.StatusCode, string(text)
}

func TestPages(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Add(&v1alpha1.CircuitBreaker{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "deletes"}, Status: v1alpha1.CircuitBreakerStatus{Opened: 2}})
	b, _ := open(t, c)
	for path, want := range map[string][]string{
		"/": {
			"<title>Overview · ctrlmesh</title>", `<b class="good">healthy</b>`, `<a href="/operators/operator-demo/operator-demo">operator-demo</a>`,
			"<td>ctrlmesh-agent-1", `<body data-page="/">`, `<a href="/" aria-current="page">`,
		},
		"/operators/operator-demo/operator-demo": {
			`<meter min="0" max="30211" value="29102">29102</meter>`, "od-0 on node-1", "<td>1/1", "ebpf", "<label>namespace <input",
		},
		"/operators/operator-demo/operator-demo?key=team-42": {"<b>team-42</b>: shard", `data-page="/operators/operator-demo/operator-demo?key=team-42"`},
		"/operators/operator-demo/by-hand":                   {"<td>1/1", "iptables"},
		"/findings":                                          {"no problems found: manager v0.3.1"},
		"/limits":                                            {`<td class="bad">2`, "<h2>FaultInjections</h2>\n<p>There are none.</p>"},
		"/static/live.js":                                    {"new EventSource"},
		"/static/style.css":                                  {"prefers-color-scheme: dark"},
	} {
		code, body := b.get(path)
		require.Equal(t, http.StatusOK, code, "%s: %s", path, body)
		for _, text := range want {
			require.Contains(t, body, text, path)
		}
	}
}

func TestPagesSayWhatIsWrong(t *testing.T) {
	c := meshtest.Healthy(t)
	root := meshtest.Find[*v1alpha1.ShardingConfig](t, c, meshtest.Operator, meshtest.Operator)
	meshtest.SetCondition(root, v1alpha1.ConditionReady, false, v1alpha1.ReasonNoReadyMember, "<script>alert(1)</script>")
	b, s := open(t, c)
	_, body := b.get("/")
	require.Contains(t, body, `<b class="bad">not healthy</b>`)
	require.Contains(t, body, "&lt;script&gt;alert(1)&lt;/script&gt;")
	require.NotContains(t, body, "<script>alert")

	for path, want := range map[string]string{
		"/operators/operator-demo/none": "there is no ShardingConfig none in namespace operator-demo", "/none": "there is no such page", "/operators/a": "there is no such page",
	} {
		code, body := b.get(path)
		require.Equal(t, http.StatusNotFound, code)
		require.Contains(t, body, want)
	}
	s.Namespace = "team"
	code, _ := b.get("/operators/operator-demo/operator-demo")
	require.Equal(t, http.StatusNotFound, code, "the user chose one namespace")

	c.Forbidden = func(client.ObjectList) error { return errors.New("you may not list it") }
	code, body = b.get("/limits")
	require.Equal(t, http.StatusInternalServerError, code)
	require.Contains(t, body, "you may not list it")
}

func TestOnlyTheUserReads(t *testing.T) {
	b, s := open(t, meshtest.Healthy(t))
	stranger := b
	stranger.cookie = ""
	for _, path := range []string{"/", "/findings", "/events?page=/", "/enter", "/enter?token=guessed"} {
		code, body := stranger.get(path)
		require.Equal(t, http.StatusForbidden, code, path)
		require.NotContains(t, body, "operator-demo")
	}
	resp := stranger.request(t.Context(), http.MethodGet, "/enter?token="+s.Token)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Len(t, resp.Cookies(), 1)
	require.True(t, resp.Cookies()[0].HttpOnly)
	require.Equal(t, http.SameSiteStrictMode, resp.Cookies()[0].SameSite)
	require.Contains(t, resp.Header.Get("Content-Security-Policy"), "default-src 'none'")

	b.host = "rebound.example.com"
	code, _ := b.get("/")
	require.Equal(t, http.StatusForbidden, code, "a name that was pointed to this machine")
	b.host = ""
	written := b.request(t.Context(), http.MethodPost, "/")
	defer written.Body.Close()
	require.Equal(t, http.StatusMethodNotAllowed, written.StatusCode)
}

func TestPagesFollowTheCluster(t *testing.T) {
	c := meshtest.Healthy(t)
	var mu sync.Mutex
	failure := errors.New("the apiserver restarts")
	c.Forbidden = func(client.ObjectList) error {
		mu.Lock()
		defer mu.Unlock()
		return failure
	}
	b, _ := open(t, c)
	ctx, leave := context.WithCancel(t.Context())
	resp := b.request(ctx, http.MethodGet, "/events?page=/")
	defer resp.Body.Close()
	require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
	lines := bufio.NewScanner(resp.Body)
	until := func(text string) {
		t.Helper()
		for lines.Scan() {
			require.True(t, lines.Text() == "" || strings.HasPrefix(lines.Text(), "data: ") || strings.HasPrefix(lines.Text(), ": "), lines.Text())
			if strings.Contains(lines.Text(), text) {
				return
			}
		}
		require.FailNow(t, "the stream has ended", "%v", lines.Err())
	}
	until("the apiserver restarts")
	until(": nothing has changed")
	mu.Lock()
	failure = nil
	mu.Unlock()
	until(`<b class="good">healthy</b>`)
	leave()
}

func TestPagesThatFollowAreBounded(t *testing.T) {
	b, s := open(t, meshtest.Healthy(t))
	for range maxLive {
		s.live <- struct{}{}
	}
	code, body := b.get("/events?page=/")
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Contains(t, body, "close some")
	code, _ = b.get("/events?page=http://elsewhere/")
	require.Equal(t, http.StatusBadRequest, code)
}
