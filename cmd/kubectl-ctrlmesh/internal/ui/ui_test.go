package ui

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// browser is a browser of the user.
type browser struct {
	*testing.T
	url  string // with the token, without a slash at the end
	host string
}

// open returns a browser of the user, and the server.
func open(t *testing.T, c *meshtest.Cluster) (browser, *Server) {
	t.Helper()
	s := &Server{Reader: c.Reader(t), Token: "of-the-user", Poll: time.Millisecond}
	pages := httptest.NewServer(s.Handler())
	t.Cleanup(pages.Close)
	s.Hosts = []string{strings.TrimPrefix(pages.URL, "http://")}
	return browser{t, pages.URL + "/of-the-user", ""}, s
}

// observed adds a workload on the mesh that no ShardingConfig selects.
func observed(c *meshtest.Cluster) {
	labels := map[string]string{v1alpha1.EnableProxyLabel: "true"}
	pod := meshtest.Pod(meshtest.Operator, "tally-0", "node-1")
	pod.Labels = labels
	pod.Annotations = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustBoth}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "tally", Controller: new(true)}}
	c.Add(pod, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "tally"},
		Spec:       appsv1.StatefulSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}},
	})
}

// logs lets agents log access lines, and have logged some.
func logs(t *testing.T, c *meshtest.Cluster) {
	for _, name := range []string{snapshot.Agent + "-1", snapshot.Agent + "-2"} {
		meshtest.Find[*corev1.Pod](t, c, snapshot.DefaultNamespace, name).Spec.Containers[0].Args = []string{"--log-level=debug"}
	}
	var log strings.Builder
	line := func(pod, verb, namespace, more string) {
		fmt.Fprintf(&log, `{"time":"2026-01-02T03:04:05Z","msg":"request","pod":%q,"verb":%q,"group":"example.com","resource":"foos","namespace":%q,"name":"web"%s}`+"\n", pod, verb, namespace, more)
	}
	for i := range 30 {
		line("operator-demo/tally-0", "update", fmt.Sprintf("team-%d", i%3), `,"code":200`)
	}
	line("operator-demo/od-1", "get", "team-43", `,"code":200,"shard":"operator-demo-2-normal"`)
	line("operator-demo/od-1", "update", "team-42", `,"code":403,"shard":"operator-demo-2-normal"`)
	line("operator-demo/od-1", "patch", "team-43", `,"code":429,"limited_by":"<b>"`)
	c.Logs = func(context.Context, string, string, *corev1.PodLogOptions) (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader(log.String())), nil
	}
}

// request requests a path. The caller closes the body.
func (b browser) request(ctx context.Context, method, path string) *http.Response {
	b.Helper()
	req, err := http.NewRequestWithContext(ctx, method, b.url+path, nil)
	require.NoError(b, err)
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
	observed(c)
	logs(t, c)
	c.Counts()
	b, _ := open(t, c)
	for path, want := range map[string][]string{
		"/": {
			"<title>Overview · ctrlmesh</title>", `<b class="good">healthy</b>`, `<a href="/of-the-user/operators/operator-demo/operator-demo">operator-demo</a>`,
			"<td>ctrlmesh-agent-1", `<body data-events="/of-the-user/events" data-page="/">`, `<a href="/of-the-user/" aria-current="page">`,
			`<a href="/of-the-user/advice/operator-demo/statefulset/tally">`, `<a href="/of-the-user/pods/operator-demo/tally-0">tally-0</a>`,
		},
		"/operators/operator-demo/operator-demo": {
			`<meter min="0" max="30211" value="29102">29102</meter>`, "od-0 on node-1", "<td>1/1", "ebpf", "<label>namespace <input", `<a href="/of-the-user/pods/operator-demo/od-0">od-0</a>`,
		},
		"/operators/operator-demo/operator-demo?key=team-42": {"<b>team-42</b>: shard", "now by od-0: passes, by od-1: 403", `data-page="/operators/operator-demo/operator-demo?key=team-42"`},
		"/operators/operator-demo/by-hand":                   {"<td>1/1", "iptables"},
		"/pods/operator-demo/od-1": {
			"<p>shard operator-demo-2-normal, captured by ebpf", "are refused with 403", "<option selected>get</option>", "limited_by=&lt;b&gt;", `<td class="bad">403<td>update<td>foos<td>team-42/web`,
		},
		"/pods/operator-demo/od-1?verb=update&resource=foos&namespace=team-42": {`class="bad">403 foreign`, "<option selected>update</option>", `value="team-42"`},
		"/pods/operator-demo/od-1?verb=list&resource=foos&all=yes":             {`class="good">narrowed`, ` checked>`},
		"/pods/operator-demo/od-1?verb=list&resource=fooz":                     {"did you mean foos?"},
		"/advice/operator-demo/statefulset/tally": {
			"It can be divided by namespace.", "<li>example.com/foos", "<code>kubectl ctrlmesh adopt statefulset/tally -n operator-demo", `data-page=""`,
		},
		"/findings":         {`<td class="bad">error<td>ca-missing<td>ConfigMap operator-demo/`},
		"/costs":            {"Measuring: rates follow"},
		"/limits":           {`<td class="bad">2`, "<h2>FaultInjections</h2>\n<p>There are none.</p>"},
		"/static/live.js":   {"new EventSource"},
		"/static/style.css": {"prefers-color-scheme: dark"},
	} {
		code, body := b.get(path)
		require.Equal(t, http.StatusOK, code, "%s: %s", path, body)
		for _, text := range want {
			require.Contains(t, body, text, path)
		}
	}
}

func TestCostsAreMeasuredAgainAndAgain(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Counts()
	counts, read := c.Metrics, 0
	passed := time.Duration(0)
	clock := c.Clock
	c.Clock = func() time.Time { return clock().Add(passed) }
	c.Metrics = func(ctx context.Context, pod *corev1.Pod) (io.ReadCloser, error) {
		if pod.Name == snapshot.Agent+"-1" {
			read++
		}
		return counts(ctx, pod)
	}
	b, _ := open(t, c)
	_, body := b.get("/costs")
	require.Contains(t, body, "Measuring")
	_, _ = b.get("/costs")
	require.Equal(t, 1, read, "the metrics of all agents are not read with each poll")
	for range 10 {
		passed += costsEvery
		_, body = b.get("/costs")
	}
	require.Equal(t, 11, read)
	require.Contains(t, body, "over the last 60 seconds")
	require.Contains(t, body, "<td>statefulset/od<td>operator-demo-1-normal<td>5.0<td>1.5")
	require.Contains(t, body, "<td>foos<td>8.0")
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
		"/operators/operator-demo/none": "there is no ShardingConfig none in namespace operator-demo", "/none": "there is no such page", "/operators/a": "there is no such page", "/operators/a/b/c": "there is no such page",
	} {
		code, body := b.get(path)
		require.Equal(t, http.StatusNotFound, code)
		require.Contains(t, body, want)
	}
	s.Namespace = "team"
	for _, path := range []string{"/operators/operator-demo/operator-demo", "/pods/operator-demo/od-0", "/advice/operator-demo/statefulset/a"} {
		code, _ := b.get(path)
		require.Equal(t, http.StatusNotFound, code, "the user chose one namespace")
	}

	c.Forbidden = func(client.ObjectList) error { return errors.New("you may not list it") }
	code, body := b.get("/limits")
	require.Equal(t, http.StatusInternalServerError, code)
	require.Contains(t, body, "you may not list it")
}

func TestOnlyTheUserReads(t *testing.T) {
	b, _ := open(t, meshtest.Healthy(t))
	stranger := b
	for _, begin := range []string{"", "/guessed", "/of-the-use", "/of-the-user2"} {
		stranger.url = strings.TrimSuffix(b.url, "/of-the-user") + begin
		for _, path := range []string{"", "/", "/findings", "/events?page=/", "/static/live.js"} {
			code, body := stranger.get(path)
			require.Equal(t, http.StatusForbidden, code, begin+path)
			require.NotContains(t, body, "operator-demo")
		}
	}
	resp := b.request(t.Context(), http.MethodGet, "/")
	defer resp.Body.Close()
	require.Contains(t, resp.Header.Get("Content-Security-Policy"), "default-src 'none'")
	require.Equal(t, "no-referrer", resp.Header.Get("Referrer-Policy"), "others must not see the token")
	require.Empty(t, resp.Cookies(), "browsers send cookies to all ports")

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
	for _, page := range []string{"http://elsewhere/", "/advice/operator-demo/statefulset/tally"} {
		code, _ = b.get("/events?page=" + page)
		require.Equal(t, http.StatusBadRequest, code)
	}
}
