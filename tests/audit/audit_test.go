package audit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

var start = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

func members() Callers {
	return Callers{Users: []string{ServiceAccount("operator-demo", "tally")}, Since: start}
}

func open(t *testing.T, name string) io.Reader {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func ids(rs []Request) (out []string) {
	for _, r := range rs {
		out = append(out, r.ID)
	}
	return out
}

// The log has a request of each kind that must count or must not.
func TestRequestsWithoutAccessLineLeaked(t *testing.T) {
	requests, err := Requests(open(t, "audit.log"), members())
	require.NoError(t, err)
	require.Equal(t, []string{"watch", "get", "update"}, ids(requests),
		"one per request, none of other users, none from before, none of the unfinished line")
	require.Equal(t, int32(200), requests[0].Code)
	require.Equal(t, "operator-demo/tally-0", requests[0].Pod)
	require.Equal(t, []string{"10.244.1.4"}, requests[0].From)
	require.False(t, requests[0].Ended.IsZero())

	lines, err := AccessLines(open(t, "agent.log"))
	require.NoError(t, err)
	require.Len(t, lines, 4)
	require.Equal(t, Access{
		ID: "get", Time: start.Add(2 * time.Second), Pod: "operator-demo/tally-0", UID: "u0",
		Verb: "get", Resource: "tallies", Code: 200,
	}, lines[1])

	leaked := Leaked(requests, lines)
	require.Equal(t, []string{"update"}, ids(leaked))
	require.Contains(t, leaked[0].String(), "update /apis/tally.example.com/v1/namespaces/demo-01/tallies/t-1/status 200")

	require.Empty(t, Leaked(requests, append(lines, Access{ID: "update"})))
	require.Len(t, Leaked(requests, nil), 3, "without an access log everything leaked")
}

func TestCallersByPod(t *testing.T) {
	by := func(pods ...string) []string {
		t.Helper()
		requests, err := Requests(open(t, "audit.log"), Callers{Pods: pods})
		require.NoError(t, err)
		return ids(requests)
	}
	require.Equal(t, []string{"before", "watch", "get"}, by("operator-demo/tally-0"))
	require.Equal(t, []string{"elsewhere"}, by("other/tally-0"), "the same name in another namespace")
	require.Empty(t, by("operator-demo/tally-9"))
}

func TestRequestsRejectOtherFiles(t *testing.T) {
	_, err := Requests(strings.NewReader("\nsystem:serviceaccount:operator-demo:tally {\n"), members())
	require.ErrorContains(t, err, "line 2")

	broken := errors.New("broken disk")
	_, err = Requests(iotest.ErrReader(broken), members())
	require.ErrorIs(t, err, broken)
}

func TestAccessLinesOfAnyLength(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	log := fmt.Sprintf("{\"msg\":\"request\",\"audit_id\":\"a\",\"pod\":%q}\n{\"msg\":\"request\",\"audit_id\":\"b\"}\n", long)
	lines, err := AccessLines(strings.NewReader(log))
	require.NoError(t, err)
	require.Len(t, lines, 2)
	require.Equal(t, long, lines[0].Pod)
	require.Equal(t, "b", lines[1].ID)
}

func TestRequestsThatFillACache(t *testing.T) {
	for _, c := range []struct {
		verb, uri string
		fills     bool
	}{
		{"list", "/api/v1/configmaps?limit=500", true},
		{"watch", "/api/v1/configmaps?sendInitialEvents=true&watch=true", true},
		{"watch", "/api/v1/configmaps?resourceVersion=7&watch=true", false},
		{"watch", "/api/v1/configmaps?sendInitialEvents=false&watch=true", false},
		{"get", "/api/v1/namespaces/a/configmaps/b?sendInitialEvents=true", false},
		{"deletecollection", "/api/v1/namespaces/a/configmaps?labelSelector=x", false},
	} {
		require.Equal(t, c.fills, Request{Verb: c.verb, URI: c.uri}.Fills(), "%s %s", c.verb, c.uri)
	}
}

// The line that an agent writes before it sends a stream counts: the agent may be killed
// before the apiserver answers.
func TestLineOfUnansweredStream(t *testing.T) {
	lines, err := AccessLines(strings.NewReader(
		`{"time":"2026-11-20T10:00:44Z","level":"DEBUG","msg":"stream begins","audit_id":"slow","pod":"ns/a","uid":"u0","verb":"watch","resource":"configmaps"}` + "\n"))
	require.NoError(t, err)
	watch := Request{ID: "slow", Verb: "watch", Received: start.Add(44 * time.Second)}
	require.Empty(t, Leaked([]Request{watch}, lines))
	leaked, _ := CutOff(Leaked([]Request{watch}, nil), []time.Time{start.Add(45 * time.Second)}, func(string) bool { return true })
	require.Len(t, leaked, 1, "a watch without any line leaked")
}

// A killed agent cannot write lines. This excuses its requests in flight, and nothing else.
func TestKilledAgentExcusesRequestsInFlight(t *testing.T) {
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	requests := []Request{
		{ID: "over before", Received: at(43_000), Ended: at(43_900)},
		{ID: "just over", Received: at(44_800), Ended: at(44_900)},
		{ID: "under way", Received: at(44_900), Ended: at(45_100)},
		{ID: "slow", Received: at(40_000)},
		{ID: "a watch just asked for", Verb: "watch", Received: at(44_990)},
		{ID: "a watch that was answered", Verb: "watch", Received: at(41_000)},
		{ID: "after it", Received: at(45_001), Ended: at(45_100)},
		{ID: "after it, sent to the mesh", Received: at(45_001), Ended: at(45_100)},
		{ID: "long after it, sent to the mesh", Received: at(48_001), Ended: at(48_100)},
	}
	toTheMesh := func(id string) bool { return strings.HasSuffix(id, "to the mesh") }
	leaked, cut := CutOff(requests, []time.Time{at(90_000), at(45_000)}, toTheMesh)
	require.Equal(t, []string{"over before", "a watch just asked for", "a watch that was answered", "after it", "long after it, sent to the mesh"}, ids(leaked))
	require.Equal(t, []string{"just over", "under way", "slow", "after it, sent to the mesh"}, ids(cut))
	leaked, cut = CutOff(requests, nil, toTheMesh)
	require.Len(t, leaked, len(requests))
	require.Empty(t, cut)
}
