package e2e

import (
	"archive/zip"
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/usage"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// plugin runs the kubectl plugin, and returns what it printed and its exit code.
func plugin(ctx context.Context, t *testing.T, args ...string) (out string, code int) {
	t.Helper()
	printed, err := cluster.Plugin(ctx, args...).CombinedOutput()
	if exited, ok := errors.AsType[*exec.ExitError](err); ok && ctx.Err() == nil {
		return string(printed), exited.ExitCode()
	}
	require.NoError(t, err, "%s", printed)
	return string(printed), 0
}

// says requires that the plugin prints some texts and exits with a code.
func says(t *testing.T, code int, args []string, texts ...string) {
	t.Helper()
	out, exited := plugin(t.Context(), t, args...)
	require.Equal(t, code, exited, "%s", out)
	for _, text := range texts {
		require.Contains(t, out, text)
	}
}

// ownerByPlugin returns the shard of a root that owns a namespace, as the plugin prints it.
func ownerByPlugin(t *testing.T, home, root, namespace string) string {
	t.Helper()
	out, code := plugin(t.Context(), t, "owner", root, namespace, "-n", home, "-o", "json")
	require.Zero(t, code, "%s", out)
	var owner struct{ Shard string }
	require.NoError(t, json.Unmarshal([]byte(out), &owner), "%s", out)
	return owner.Shard
}

// The plugin finds nothing wrong with a healthy mesh, and shows what is there.
func TestCommandLine(t *testing.T) {
	p := newPair(t)
	until(t, "a mesh without findings", func(ctx context.Context) error { // an earlier test may have restarted parts of it
		if out, code := plugin(ctx, t, "check"); code != 0 {
			return fmt.Errorf("exit code %d: %s", code, out)
		}
		return nil
	})
	says(t, 0, []string{"check", "--pre"}, "no problems found")
	says(t, 0, []string{"status", "--wait"}, p.namespace, "manager: 2/2 ready")
	says(t, 0, []string{"version"}, "manager", "agent")
	says(t, 0, []string{"shards", "a", "-n", p.namespace}, "1/1", "ebpf")
	says(t, 2, []string{"shards", "none", "-n", p.namespace}, "none")
	says(t, 0, []string{"lint", "-f", filepath.Join(cluster.Root, "deploy", "examples", "sharding-root.yaml")})
	misspelled := filepath.Join(t.TempDir(), "misspelled.yaml")
	require.NoError(t, os.WriteFile(misspelled, []byte("apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\nspec: {limit: []}\n"), 0o600))
	says(t, 1, []string{"lint", "-f", misspelled}, "spec.limit: unknown field")
	testSysdump(t)
	p.pages(t)
	out, code := plugin(t.Context(), t, "upgrade", "check")
	require.NotContains(t, out, "error ", "nothing hinders an upgrade to the same version")
	require.Less(t, code, 2, "%s", out) // it warns of versions that are no releases
}

// testSysdump looks into an archive of the state of the mesh.
func testSysdump(t *testing.T) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "mesh.zip")
	says(t, 0, []string{"sysdump", "--file", file, "--since", "10m"}, file+": ")
	archive, err := zip.OpenReader(file)
	require.NoError(t, err)
	defer archive.Close()
	for _, want := range []string{"status.txt", "configuration/shardingconfig.ctrlmesh.kusionstack.io.yaml", "mesh/daemonset.yaml", "members/pod.yaml"} {
		text, err := fs.ReadFile(&archive.Reader, want)
		require.NoError(t, err)
		require.NotEmpty(t, text)
	}
	logs, err := fs.Glob(&archive.Reader, "logs/*/*.log")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(logs), 4, "of two managers and two agents")
}

// pages opens the overview, and the page of a pod that it leads to, and ends the server.
func (p *pair) pages(t *testing.T) {
	t.Helper()
	ui := cluster.Plugin(t.Context(), "ui")
	printed, err := ui.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, ui.Start())
	line, err := bufio.NewReader(printed).ReadString('\n')
	require.NoError(t, err)
	overview := strings.Fields(line)[1]

	browser := &http.Client{Timeout: patience}
	get := func(url string) string {
		t.Helper()
		resp, err := browser.Get(url) // the client has a time limit
		require.NoError(t, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, resp.StatusCode, "%s", text)
		return string(text)
	}
	require.Contains(t, get(overview), "operators/"+p.namespace+"/a\"")
	pod := "pods/" + p.namespace + "/" + p.a.Name
	require.Contains(t, get(overview+"operators/"+p.namespace+"/a"), pod+"\"")
	require.Contains(t, get(overview+pod+"?verb=list&resource=configmaps&all=yes"), "narrowed")
	require.NoError(t, ui.Process.Signal(os.Interrupt))
	require.NoError(t, ui.Wait())
}

// tallyRoot divides the operator of running. It hands nothing over by itself.
const tallyRoot = `
apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: tally}
spec:
  controller: {leaderElectionName: ` + tallyLock + `}
  root:
    prefix: tally
    targetRef: {kind: StatefulSet, name: tally}
    auto: {shardingSize: 2, everyShardReplicas: 1, rebalance: "Off"}
    resourceSelector: [{relateResources: [{apiGroups: [tally.example.com], resources: [tallies]}]}]
`

// identities are the parts of an adopted operator that a second adoption must not change.
func (op *running) identities(t *testing.T) []string {
	t.Helper()
	c, err := op.root(t.Context())
	require.NoError(t, err)
	workload := op.object()
	require.NoError(t, cluster.Get(t.Context(), client.ObjectKeyFromObject(workload), workload))
	out := []string{fmt.Sprintf("root %s, generation %d", c.UID, c.Generation), fmt.Sprintf("workload %s, generation %d", workload.GetUID(), workload.GetGeneration())}
	var pods corev1.PodList
	require.NoError(t, cluster.List(t.Context(), &pods, client.InNamespace(op.home), client.MatchingLabels{"app": "tally"}))
	for _, pod := range pods.Items {
		out = append(out, fmt.Sprintf("pod %s %s", pod.Name, pod.UID))
	}
	return out
}

// The plugin adopts a running operator, and removes it. Run again, it changes nothing.
func TestAdoptedByPlugin(t *testing.T) {
	t.Parallel()
	op := newRunning(t, "StatefulSet", types.NamespacedName{})
	op.works(t)
	file := filepath.Join(t.TempDir(), "root.yaml")
	require.NoError(t, os.WriteFile(file, []byte(tallyRoot), 0o600))
	absent := func() {
		t.Helper()
		_, err := op.root(t.Context())
		require.True(t, apierrors.IsNotFound(err), "%v", err)
	}
	adopt := func(args ...string) []string {
		return append([]string{"adopt", "statefulset/tally", "-n", op.home}, args...)
	}
	says(t, 1, adopt(), "no ShardingConfig targets StatefulSet tally")
	says(t, 1, adopt("--shards=3", "--resources=tally.example.com/tallies"), "scale statefulset/tally --replicas=3")
	says(t, 0, adopt("--shards=2", "--resources=tally.example.com/tallies", "--dry-run"), "shardingSize: 2", "kubectl -n "+op.home+" patch statefulset/tally")
	says(t, 0, []string{"plan", "-n", op.home, "-f", file}, "2 shards would divide", "tally-0", "tally-1", "lock "+op.home+"/")
	absent()

	says(t, 0, adopt("-f", file), "done: create ShardingConfig tally", "is adopted by ShardingConfig tally: 2 shards; leaders: tally-0, tally-1")
	op.sharded(t)
	before := op.identities(t)
	says(t, 0, adopt("-f", file), "is adopted by ShardingConfig tally")
	says(t, 0, adopt(), "is adopted by ShardingConfig tally")
	require.Equal(t, before, op.identities(t))
	op.sharded(t)

	says(t, 0, []string{"remove", "tally", "-n", op.home, "--dry-run"}, "kubectl -n "+op.home+" delete shardingconfig tally")
	require.Equal(t, before, op.identities(t))
	says(t, 0, []string{"remove", "tally", "-n", op.home}, "done: delete the ShardingConfig", "StatefulSet tally is not on the mesh")
	absent()
	op.rolledOut(t)
	op.unsharded(t)
	says(t, 2, []string{"remove", "tally", "-n", op.home}, "name the workload")
	says(t, 0, []string{"remove", "sts/tally", "-n", op.home}, "is not on the mesh")
}

// An operator is put on the mesh without a configuration, observed, and divided as advised.
func TestAdoptedAsAdvised(t *testing.T) {
	t.Parallel()
	op := newRunning(t, "StatefulSet", types.NamespacedName{})
	workload := "statefulset/tally"
	says(t, 2, []string{"advise", workload, "-n", op.home}, "kubectl -n "+op.home+" patch "+workload)
	op.label(t, true, 0)
	op.rolledOut(t)
	require.Len(t, op.works(t), 1, "one pod leads, and its requests pass unchanged")
	var advice struct {
		Divide, Locks []string
		Next          string
	}
	recorded := &corev1.ConfigMap{}
	until(t, "the record of the manager", func(ctx context.Context) error {
		return cluster.Get(ctx, client.ObjectKey{Namespace: op.home, Name: usage.ConfigMap}, recorded)
	})
	require.Contains(t, recorded.Data, "statefulset.tally")
	until(t, "the advice", func(ctx context.Context) error { // of all that it did
		out, code := plugin(ctx, t, "advise", workload, "-n", op.home, "-o", "json")
		if code != 0 {
			return fmt.Errorf("exit code %d: %s", code, out)
		}
		return json.Unmarshal([]byte(out), &advice)
	})
	require.Equal(t, []string{"tally.example.com/tallies"}, advice.Divide)
	require.Equal(t, []string{op.lock.String()}, advice.Locks)
	command, ok := strings.CutSuffix(strings.TrimPrefix(advice.Next, "kubectl ctrlmesh "), " --dry-run")
	require.True(t, ok, advice.Next)
	says(t, 0, strings.Fields(command), "is adopted by ShardingConfig tally: 2 shards; leaders: tally-0, tally-1")
	op.sharded(t)
}

// The plugin shows open breakers and faults in force, and ends them.
func TestTrafficByPlugin(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	ns, caller := pod.Namespace, hastyClient(t, pod)
	in := "/api/v1/namespaces/" + ns
	breaker(t, ns, "by-plugin", `
rateLimitings:
- name: by-hand
  resourceRules: [{apiGroups: [""], resources: [secrets], verbs: ["*"], namespaces: ["*"]}]
  bucket: {burst: 1, interval: 1h, limit: 1}
  recoverPolicy: {type: Manual}
`, 1)
	require.Equal(t, http.StatusOK, caller.get(t, in+"/secrets").code)
	require.Equal(t, http.StatusTooManyRequests, caller.get(t, in+"/secrets").code)
	until(t, "the open breaker in the status", func(ctx context.Context) error {
		out, code := plugin(ctx, t, "breaker", "-n", ns)
		if code == 0 {
			return errors.New(out)
		}
		require.Equal(t, 1, code, "%s", out)
		require.Contains(t, out, "by kubectl ctrlmesh breaker close by-plugin -n "+ns)
		return nil
	})
	says(t, 0, []string{"breaker", "close", "by-plugin", "-n", ns}, "no breaker of CircuitBreaker "+ns+"/by-plugin is open")
	says(t, 0, []string{"breaker", "disable", "by-plugin", "-n", ns}, "none of its rules applies")
	for range 3 {
		require.Equal(t, http.StatusOK, caller.get(t, in+"/secrets").code)
	}
	says(t, 0, []string{"breaker", "enable", "by-plugin", "-n", ns}, "is enabled")

	faults(t, ns, "by-plugin", `
httpFault:
- name: conflicts
  match: {resources: [{resources: [services]}]}
  abort: {httpStatus: 409, percent: "100"}
`, 1)
	require.Equal(t, http.StatusConflict, caller.get(t, in+"/services").code)
	says(t, 1, []string{"faults", "-n", ns}, "InForce", "abort 409")
	says(t, 0, []string{"faults", "stop", "by-plugin", "-n", ns}, "no fault is in force in a pod")
	require.Equal(t, http.StatusOK, caller.get(t, in+"/services").code)
	says(t, 0, []string{"faults", "-n", ns}, "Disabled")
}

// The plugin shows the requests of one pod, and what they cost, and ends when it is interrupted.
func TestTap(t *testing.T) {
	t.Parallel()
	pod := clientPod(t)
	caller := hastyClient(t, pod)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := cluster.Plugin(ctx, "tap", pod.Name, "-n", pod.Namespace, "--resource=limitranges", "--code=200")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	requests, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // the log may be followed only after some of them
		for kube.Sleep(requests, 200*time.Millisecond) == nil {
			_, _ = caller.try(requests, http.MethodGet, "/api/v1/namespaces/"+pod.Namespace+"/limitranges")
		}
	}()
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan(), "%v", lines.Err())
	require.Contains(t, lines.Text(), " 200 list limitranges "+pod.Namespace+" ")
	until(t, "the costs of the requests", func(ctx context.Context) error { // an agent may be replaced meanwhile
		out, code := plugin(ctx, t, "cost", "-n", pod.Namespace, "--for", "2s")
		return orElse(code == 0 && strings.Contains(out, " limitranges "), out)
	})
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	for lines.Scan() {
		require.Contains(t, lines.Text(), " 200 list limitranges "+pod.Namespace+" ")
	}
	require.NoError(t, cmd.Wait())
	says(t, 2, []string{"tap", "none", "-n", pod.Namespace}, "there is no pod none")
}
