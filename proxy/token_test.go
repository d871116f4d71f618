package proxy

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline/stages"
)

// jwt is an unsigned token of a service account, bound to the pod if uid is not
// empty.
func jwt(uid string) string {
	claims := `{"namespace":"ns"}`
	if uid != "" {
		claims = fmt.Sprintf(`{"namespace":"ns","pod":{"name":"pod","uid":%q}}`, uid)
	}
	return encoded(`{"iss":"https://kubernetes.default.svc","kubernetes.io":` + claims + `}`)
}

func encoded(payload string) string {
	enc := base64.RawURLEncoding.EncodeToString
	return enc([]byte(`{"alg":"none"}`)) + "." + enc([]byte(payload)) + "." + enc([]byte("signature"))
}

func TestTokens(t *testing.T) {
	t.Parallel()
	mine, others, unbound := jwt("uid-1"), jwt("uid-2"), jwt("")
	websocket := func(token string) []string {
		return []string{
			"Connection", "Upgrade", "Upgrade", "websocket",
			"Sec-WebSocket-Protocol", "v4.channel.k8s.io, " + "base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString([]byte(token)),
		}
	}
	const secrets, exec = "/api/v1/namespaces/a/secrets/b", "/api/v1/namespaces/a/pods/b/exec?answer=200"
	for _, c := range []struct {
		name, target string
		header       []string
		want         int // of a pod under Enforce
		address      int // of one that is identified by its address
	}{
		{"none", secrets, nil, 200, 401},
		{"own", secrets, []string{"Authorization", "Bearer " + mine}, 200, 200},
		{"own, spelled oddly", secrets, []string{"Authorization", " bEARER " + mine + " x"}, 200, 200},
		{"another pod's", secrets, []string{"Authorization", "Bearer " + others}, 403, 403},
		{"another pod's, spelled oddly", secrets, []string{"Authorization", "\tbearer " + others + " " + mine}, 403, 403},
		{"no pod's", secrets, []string{"Authorization", "Bearer " + unbound}, 200, 403},
		{"opaque", secrets, []string{"Authorization", "Bearer abc"}, 200, 403},
		{"with dots", secrets, []string{"Authorization", "Bearer a.b.c"}, 200, 403},
		{"other claims", secrets, []string{"Authorization", "Bearer " + encoded(`{"kubernetes.io":{"pod":"x"}}`)}, 200, 403},
		{"a JSON serialisation", secrets, []string{"Authorization", `Bearer {"a":".` + strings.Split(mine, ".")[1] + `.","payload":"x"}`}, 401, 401},
		{"too long", secrets, []string{"Authorization", "Bearer " + strings.Repeat("x", 64<<10+1)}, 401, 401},
		{"no token", secrets, []string{"Authorization", "Basic dTpw"}, 200, 401},
		{"two", secrets, []string{"Authorization", "Bearer " + mine, "Authorization", "Bearer " + others}, 401, 401},
		{"query", secrets + "?access_token=" + others, nil, 403, 403},
		{"query, escaped", secrets + "?a=b&access%5ftoken=" + others, nil, 403, 403},
		{"query, the second", secrets + "?access_token=%zz&access_token=" + others, nil, 403, 403},
		{"query, own header", secrets + "?access_token=" + others, []string{"Authorization", "Bearer " + mine}, 403, 403},
		{"query of an application", secrets + "?access_token=abc", []string{"Authorization", "Bearer " + mine}, 200, 200},
		{"websocket, own", exec, websocket(mine), 200, 200},
		{"websocket, another pod's", exec, websocket(others), 403, 403},
		{"websocket, behind own", exec, append(websocket(others), "Authorization", "Bearer "+mine), 403, 403},
		{"websocket, no pod's", exec, websocket(unbound), 200, 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			api := &recorder{then: echo}
			if c.target != exec {
				api.then = nil
			}
			m := newMesh(t, api)
			m.policy(nil)
			var head strings.Builder
			fmt.Fprintf(&head, "GET %s HTTP/1.1\r\nHost: x\r\n", c.target)
			for i := 0; i < len(c.header); i += 2 {
				fmt.Fprintf(&head, "%s: %s\r\n", c.header[i], c.header[i+1])
			}
			request := head.String() + "\r\n"
			for range 2 { // the second time from memory
				m.pod.env.Info.RequireToken = false
				a := m.raw(request)
				require.Equal(t, c.want, a.StatusCode, a.body)
				if c.want == 403 {
					require.Contains(t, a.body, "spec.tokenBinding")
					require.Equal(t, metav1.StatusReasonForbidden, statusOf(t, a).Reason)
				}
			}
			m.pod.env.Info.RequireToken, m.pod.env.Tokens = true, stages.Tokens{}
			for _, anyToken := range []bool{false, true} {
				m.set(&meshv1.PodPolicy{Uid: "uid-1", AnyToken: anyToken})
				require.Equal(t, c.address, m.raw(request).StatusCode)
			}
			m.pod.env.Info.RequireToken = false
			m.set(&meshv1.PodPolicy{Uid: "uid-1", AnyToken: true})
			require.Equal(t, 200, m.raw(request).StatusCode, "binding is off")
			for _, secret := range []string{mine, others, unbound} {
				require.NotContains(t, m.logs.String(), secret)
				require.NotContains(t, m.logs.String(), strings.Split(secret, ".")[1])
			}
		})
	}
}

func TestImpersonationPassesToTheApiserver(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	require.Equal(t, 200, m.do("GET", "/version", "", "Authorization", "Bearer "+jwt("uid-1"), "Impersonate-User", "jane", "Impersonate-Extra-Scopes", "view").StatusCode)
	require.Equal(t, "jane", api.last(t).Header.Get("Impersonate-User"))
	require.Equal(t, "view", api.last(t).Header.Get("Impersonate-Extra-Scopes"))
}

// A refused client learns which configuration to look at.
func TestTokenRefusalNamesTheConfiguration(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	for want, sharding := range map[string]*meshv1.Sharding{
		"spec.tokenBinding of ShardingConfig ns/s1 is Enforce":                        {Shard: "s1"},
		"no ShardingConfig selects the pod, so that none says spec.tokenBinding: Off": nil,
	} {
		m.policy(sharding)
		require.Contains(t, m.do("GET", "/version", "", "Authorization", "Bearer "+jwt("uid-2")).body, want)
	}
}

func TestTokenRefusalIsReportedOncePerMinute(t *testing.T) {
	t.Parallel()
	m := newMesh(t, &recorder{})
	notified := make(chan string, 10)
	m.server.config.Notify = func(pod PodInfo, reason, message string) { notified <- pod.UID + " " + reason + " " + message }
	m.policy(nil)
	for range 3 {
		require.Equal(t, 403, m.do("GET", "/version", "", "Authorization", "Bearer "+jwt("uid-2")).StatusCode)
	}
	select {
	case got := <-notified:
		require.Contains(t, got, "uid-1 TokenRefused a request was refused: ctrlmesh: the token is not bound to pod ns/pod, which sent the request: use the pod's own projected token (no ShardingConfig selects the pod")
	case <-time.After(soon):
		t.Fatal("no notice was sent")
	}
	require.Empty(t, notified)
	require.InDelta(t, 3, testutil.ToFloat64(m.server.metrics.Refusals.WithLabelValues("ns", "operator", "", "token")), 0)
}
