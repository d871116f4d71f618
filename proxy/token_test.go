package proxy

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
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

func TestImpersonationPassesToTheApiserver(t *testing.T) {
	t.Parallel()
	api := &recorder{}
	m := newMesh(t, api)
	m.policy(nil)
	require.Equal(t, 200, m.do("GET", "/version", "", "Authorization", "Bearer "+jwt("uid-1"), "Impersonate-User", "jane", "Impersonate-Extra-Scopes", "view").StatusCode)
	require.Equal(t, "jane", api.last(t).Header.Get("Impersonate-User"))
	require.Equal(t, "view", api.last(t).Header.Get("Impersonate-Extra-Scopes"))
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
	require.Equal(t, 200, m.do("GET", "/version", "", "Authorization", "Bearer "+jwt("uid-1")).StatusCode)
	for _, secret := range []string{jwt("uid-1"), jwt("uid-2")} {
		require.NotContains(t, m.logs.String(), strings.Split(secret, ".")[1])
	}
	require.InDelta(t, 3, testutil.ToFloat64(m.server.metrics.Refusals.WithLabelValues("ns", "operator", "", "token")), 0)
}
