package stages

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/pipeline"
	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// tokenWith returns a JWT with a payload, without a valid signature.
func tokenWith(payload string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".c2ln"
}

func FuzzJudge(f *testing.F) {
	for _, s := range []string{"", "a.b.c", tokenWith(`{"kubernetes.io":{"pod":{"uid":"uid-1"}}}`), tokenWith(`{"kubernetes.io":{"pod":{"uid":"uid-2"}}}`), tokenWith(`{}`), "{}", "..", tokenWith("[[[[")} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		v := judge(token, "uid-1")
		if v == own && !strings.Contains(token, ".") {
			t.Fatal("no JWT is bound")
		}
		if v != malformed && strings.ContainsAny(token, " {\"\r\n") {
			t.Fatal("read in two ways")
		}
		for _, header := range []string{"Bearer " + token, token} {
			if got, ok := bearer(header); ok && (got == "" || strings.Contains(got, " ")) {
				t.Fatalf("%q", got)
			}
		}
		_ = foreignInQuery(token, "uid-1")
	})
}

func BenchmarkCheckTokens(b *testing.B) {
	s := &tokenStage{env: &Env{Info: PodInfo{UID: "uid-1"}}}
	line := "Bearer " + tokenWith(`{"kubernetes.io":{"pod":{"uid":"uid-1"}}}`) + strings.Repeat("x", 1000)
	x := &pipeline.State{Req: pipeline.Request{Header: header.Fields{{Name: "Authorization", Value: line}}, Query: "labelSelector=a%3Db&limit=500"}}
	b.ReportAllocs()
	for b.Loop() {
		if s.Apply(x) != nil {
			b.Fatal("refused")
		}
	}
}

// jwt is an unsigned token of a service account, bound to the pod if uid is not empty.
func jwt(uid string) string {
	if uid == "" {
		return tokenWith(`{"kubernetes.io":{"namespace":"ns"}}`)
	}
	return tokenWith(fmt.Sprintf(`{"kubernetes.io":{"namespace":"ns","pod":{"name":"pod","uid":%q}}}`, uid))
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
	const secrets, exec = "/api/v1/namespaces/a/secrets/b", "/api/v1/namespaces/a/pods/b/exec"
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
		{"other claims", secrets, []string{"Authorization", "Bearer " + tokenWith(`{"kubernetes.io":{"pod":"x"}}`)}, 200, 403},
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
			m := newPod(t)
			m.policy(nil)
			for range 2 { // the second time from memory
				a := m.do("GET", c.target, "", c.header...)
				require.Equal(t, c.want, a.code, a.body)
				if c.want == 403 {
					require.Contains(t, a.body, "spec.tokenBinding")
					require.Equal(t, metav1.StatusReasonForbidden, a.status.Reason)
				}
			}
			m.env.Info.RequireToken, m.env.Observations.Tokens = true, Tokens{}
			for _, anyToken := range []bool{false, true} {
				m.set(&meshv1.PodPolicy{AnyToken: anyToken})
				require.Equal(t, c.address, m.do("GET", c.target, "", c.header...).code)
			}
			m.env.Info.RequireToken = false
			m.set(&meshv1.PodPolicy{AnyToken: true})
			require.Equal(t, 200, m.do("GET", c.target, "", c.header...).code, "binding is off")
		})
	}
}

// A refused client learns which configuration to look at.
func TestTokenRefusalNamesTheConfiguration(t *testing.T) {
	t.Parallel()
	m := newPod(t)
	for want, sharding := range map[string]*meshv1.Sharding{
		"spec.tokenBinding of ShardingConfig ns/s1 is Enforce":                        {Shard: "s1"},
		"no ShardingConfig selects the pod, so that none says spec.tokenBinding: Off": nil,
	} {
		m.policy(sharding)
		require.Contains(t, m.do("GET", "/version", "", "Authorization", "Bearer "+jwt("uid-2")).body, want)
	}
}

func TestClientCertificatesAreRefused(t *testing.T) {
	for _, c := range []struct {
		passthrough, last bool
		reason            meshv1.Refusal
		code              int
		notified          []string
	}{
		{false, true, meshv1.RefusedClientCertificate, 401, []string{ReasonClientCertificate}},
		{true, false, meshv1.RefusedPassthrough, 503, nil}, // the next connection is not seen
	} {
		m := newPod(t)
		m.set(&meshv1.PodPolicy{Passthrough: c.passthrough})
		require.Equal(t, 200, m.do("GET", "/version", "").code, "without one")
		x := m.state("GET", "/version", "")
		x.Req.Certificate = true
		a := m.decide(x)
		require.Equal(t, c.code, a.code)
		require.Equal(t, c.reason, a.reason)
		require.Equal(t, c.last, a.Last, "the connection ends")
		require.Equal(t, c.notified, m.notified)
	}
}

// Clients retry 503: the contradiction ends when the configuration is corrected.
func TestContradictionRefusesEverything(t *testing.T) {
	m := newPod(t)
	m.set(&meshv1.PodPolicy{Refuse: "two configurations"})
	for _, target := range []string{"/version", "/api/v1/pods", "//"} {
		a := m.do("GET", target, "")
		require.Equal(t, 503, a.code)
		require.Equal(t, meshv1.RefusedContradiction, a.reason)
		require.Contains(t, a.body, "two configurations")
	}
}
