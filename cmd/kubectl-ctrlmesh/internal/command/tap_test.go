package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// accessLine returns an access line of a pod of the operator.
func accessLine(second int, pod, verb string, code int) string {
	return fmt.Sprintf(`{"time":"2026-01-02T03:04:%02dZ","level":"DEBUG","msg":"request","pod":"%s/%s","verb":%q,"resource":"foos","namespace":"ns","name":"a\u001b[2J","code":%d,"added":1000000,"bytes":3}`, second, meshtest.Operator, pod, verb, code) + "\n"
}

// logging lets the agents log access lines.
func logging(t *testing.T, c *meshtest.Cluster) {
	for _, name := range []string{snapshot.Agent + "-1", snapshot.Agent + "-2"} {
		meshtest.Find[*corev1.Pod](t, c, snapshot.DefaultNamespace, name).Spec.Containers[0].Args = []string{"--log-level=debug"}
	}
}

// tapped runs the command tap on logs, one after the other. It is interrupted after the last of them.
func tapped(t *testing.T, c *meshtest.Cluster, logs []string, args ...string) (r result, requests []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read := func(_ context.Context, namespace, pod string, o *corev1.PodLogOptions) (io.ReadCloser, error) {
		request := namespace + "/" + pod
		switch {
		case o.TailLines != nil:
			request += fmt.Sprintf(" tail %d", *o.TailLines)
		case o.SinceSeconds != nil:
			request += fmt.Sprintf(" since %d s", *o.SinceSeconds)
		case o.SinceTime != nil:
			request += " since " + o.SinceTime.UTC().Format(time.TimeOnly)
		}
		requests = append(requests, request)
		if len(requests) > len(logs) {
			cancel()
			return nil, errors.New("you may not read it")
		}
		return io.NopCloser(strings.NewReader(logs[len(requests)-1])), nil
	}
	c.Logs = read
	r = prepared(ctx, t, c, "", func(*environment) {}, append([]string{"tap"}, args...)...)
	return r, requests
}

func TestTapShowsTheLinesOfOnePod(t *testing.T) {
	c := meshtest.Healthy(t)
	logging(t, c)
	first := accessLine(1, "od-1", "get", 200) + accessLine(2, "od-0", "get", 200) + "a crash\n" + accessLine(3, "od-1", "update", 409)
	second := accessLine(3, "od-1", "update", 409) + accessLine(4, "od-1", "patch", 500) // the first was read before
	r, requests := tapped(t, c, []string{first, second}, "od-1")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Equal(t, `03:04:01.000 200 get foos ns/a\x1b[2J added=1ms bytes=3
03:04:03.000 409 update foos ns/a\x1b[2J added=1ms bytes=3
03:04:04.000 500 patch foos ns/a\x1b[2J added=1ms bytes=3
`, r.out)
	require.Equal(t, []string{"ctrlmesh-system/ctrlmesh-agent-2 tail 0", "ctrlmesh-system/ctrlmesh-agent-2 since 03:04:03", "ctrlmesh-system/ctrlmesh-agent-2 since 03:04:04"}, requests)

	r, requests = tapped(t, c, []string{first}, "od-1", "--since=90s", "--verb=update,patch", "--resource=foos", "--code=4xx", "-o", "json")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Equal(t, accessLine(3, "od-1", "update", 409), r.out)
	require.Equal(t, "ctrlmesh-system/ctrlmesh-agent-2 since 90 s", requests[0])

	r, requests = tapped(t, c, []string{""}, "od-1")
	require.Equal(t, "ctrlmesh-system/ctrlmesh-agent-2 since 03:04:05", requests[1], "of a log without lines, the time of the command")
	require.Empty(t, r.out)
}

func TestTapRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		plant func(*testing.T, *meshtest.Cluster)
		args  []string
		want  string
	}{
		"no access lines": {nothing, []string{"od-0"}, "turn them on by kubectl apply -k deploy/debug"},
		"no pod":          {logging, []string{"od-7"}, "there is no pod od-7 with label"},
		"no node": {func(t *testing.T, c *meshtest.Cluster) {
			meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, "od-0").Spec.NodeName = ""
		}, []string{"od-0"}, "is on no node yet"},
		"no agent":      {losesAgent, []string{"od-1"}, "node node-2 has no agent"},
		"no permission": {logging, []string{"od-0"}, "you need permission to get pods/log in namespace ctrlmesh-system"},
		"wrong code":    {logging, []string{"od-0", "--code=40x"}, "invalid code"},
		"yaml":          {logging, []string{"od-0", "-o", "yaml"}, "choose -o table or -o json"},
		"unreachable":   {unreachable, []string{"od-0"}, "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := meshtest.Healthy(t)
			c.plant(t, cluster)
			r := runWithLogs(t, cluster, func(context.Context, string, string, *corev1.PodLogOptions) (io.ReadCloser, error) {
				return nil, errors.New("forbidden")
			}, append([]string{"tap"}, c.args...)...)
			require.Equal(t, Unknown, r.code)
			require.Contains(t, r.err, c.want)
			require.Empty(t, r.out)
		})
	}
}
