package command

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

var update = flag.Bool("update", false, "write the golden files")

// result is what a command printed, and its exit code.
type result struct {
	out, err string
	code     int
}

func (r result) String() string {
	text := r.out
	if r.err != "" {
		text += "--- standard error\n" + r.err
	}
	return fmt.Sprintf("%s--- exit code %d\n", text, r.code)
}

// run runs a command in a cluster. The namespace of the command line is that of the operator.
func run(t *testing.T, c *meshtest.Cluster, in string, args ...string) result {
	t.Helper()
	return runUntil(t, c, "", in, args...)
}

// runUntil runs a command that is interrupted when it prints a text, unless that is empty.
func runUntil(t *testing.T, c *meshtest.Cluster, text, in string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	return prepared(ctx, t, c, in, func(e *environment) { e.Out = &interrupter{e.Out, text, cancel} }, args...)
}

// logsOf returns logs of pods, in place of the apiserver.
type logsOf func(ctx context.Context, namespace, pod string, options *corev1.PodLogOptions) (io.ReadCloser, error)

// runWithLogs runs a command in a cluster with logs.
func runWithLogs(t *testing.T, c *meshtest.Cluster, logs logsOf, args ...string) result {
	t.Helper()
	return prepared(t.Context(), t, c, "", func(*environment) { c.Logs = logs }, args...)
}

// prepared runs a command in a prepared environment.
func prepared(ctx context.Context, t *testing.T, c *meshtest.Cluster, in string, prepare func(*environment), args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	e := connected(t, c, genericiooptions.IOStreams{In: strings.NewReader(in), Out: &out, ErrOut: &errs})
	prepare(e)
	code := e.run(ctx, args)
	require.NotContains(t, out.String()+errs.String(), meshtest.SecretText)
	return result{out.String(), errs.String(), code}
}

// connected returns the environment of a command line in a cluster.
func connected(t *testing.T, c *meshtest.Cluster, streams genericiooptions.IOStreams) *environment {
	e := newEnvironment(streams, meshtest.Version)
	e.poll = time.Millisecond
	e.connect = func() (snapshot.Reader, string, error) {
		return c.Reader(t), cmp.Or(*e.flags.Namespace, meshtest.Operator), nil
	}
	return e
}

// interrupter is an output that cancels a context once a text is printed.
type interrupter struct {
	io.Writer
	text   string
	cancel context.CancelFunc
}

func (i *interrupter) Write(p []byte) (int, error) {
	if i.text != "" && bytes.Contains(p, []byte(i.text)) {
		i.cancel()
	}
	return i.Writer.Write(p)
}

// requireGolden compares a result with a file of testdata.
func requireGolden(t *testing.T, name string, r result) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, os.WriteFile(file, []byte(r.String()), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err, "run go test with -update")
	assert.Equal(t, string(want), r.String(), "run go test with -update, and read the difference")
}

func root(t *testing.T, c *meshtest.Cluster) *v1alpha1.ShardingConfig {
	return meshtest.Find[*v1alpha1.ShardingConfig](t, c, meshtest.Operator, meshtest.Operator)
}

// losesLeader lets the second shard have no leader since 41 seconds.
func losesLeader(t *testing.T, c *meshtest.Cluster) {
	meshtest.Unready(meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, "od-1"))
	lease := meshtest.Find[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader---operator-demo-2-normal")
	lease.Spec.RenewTime = new(metav1.NewMicroTime(meshtest.Now.Add(-56 * time.Second)))
	r := root(t, c)
	r.Status.ReadyMembers, r.Status.Root.Shards[1].ReadyMembers = 1, 0
	r.Status.Pods[1].Capture, r.Status.Pods[1].Message = "", "no agent of node node-2 is connected to the manager"
	message := "shard operator-demo-2-normal has no ready member, so its keys have no working owner"
	meshtest.SetCondition(r, v1alpha1.ConditionReady, false, v1alpha1.ReasonNoReadyMember, "1 of 2 members ready in 2 shards; "+message)
	meshtest.SetCondition(r, v1alpha1.ConditionLeaderMissing, true, v1alpha1.ReasonNoReadyMember, message)
}

// losesAgent removes the agent of the second node.
func losesAgent(t *testing.T, c *meshtest.Cluster) {
	meshtest.Remove[*corev1.Pod](t, c, snapshot.DefaultNamespace, snapshot.Agent+"-2")
	meshtest.Find[*appsv1.DaemonSet](t, c, snapshot.DefaultNamespace, snapshot.Agent).Status.NumberReady = 1
}

// handsOver lets the first shard release the key team-42, and a few others, to the second one.
func handsOver(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	shards := r.Status.Root.Shards
	key := sharding.Keys("team-42")
	from, to := 0, 1
	if second, err := sharding.Parse(shards[1].Held); err == nil && second.Owns("team-42") {
		from, to = 1, 0
	}
	held, err := sharding.Parse(shards[from].Held)
	require.NoError(t, err)
	shards[from].Target, shards[from].Wanted = held.Minus(key).Strings(), held.Minus(key).Strings()
	receives, err := sharding.Parse(shards[to].Held)
	require.NoError(t, err)
	shards[to].Target, shards[to].Wanted = sharding.Union(receives, key).Strings(), sharding.Union(receives, key).Strings()
	r.Status.Root.Handover = "Releasing"
	r.Status.Root.Handovers = []v1alpha1.HandoverStatus{{
		From: shards[from].Name, To: shards[to].Name, Keys: key.Strings(), Phase: "Releasing", Since: metav1.NewTime(meshtest.Now.Add(-12 * time.Second)),
		WaitsFor: []string{"pod od-9 on node node-7: no agent of its node is connected", "pod od-8 on node node-7: it was deleted"},
	}}
	meshtest.SetCondition(r, v1alpha1.ConditionReady, false, v1alpha1.ReasonHandingOver, "2 of 2 members ready in 2 shards; keys are handed over")
}

// plans lets the second shard wait for a ready pod before it receives the key team-42.
// lacksPods removes the pod of the second shard.
func lacksPods(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Status.Root.Shards[1].Members = 0
	meshtest.Remove[*corev1.Pod](t, c, meshtest.Operator, "od-1")
	meshtest.SetCondition(r, v1alpha1.ConditionReady, false, v1alpha1.ReasonNotEnoughPods, "1 of 1 members ready in 2 shards; StatefulSet operator-demo lacks 1 pods: shard operator-demo-2-normal has fewer than it needs")
}

func plans(t *testing.T, c *meshtest.Cluster) {
	handsOver(t, c)
	r := root(t, c)
	r.Status.Root.Handover, r.Status.Root.Handovers = "Waiting", nil
	for i := range r.Status.Root.Shards {
		r.Status.Root.Shards[i].Target = r.Status.Root.Shards[i].Held
	}
}

// grants is handsOver in its second phase.
func grants(t *testing.T, c *meshtest.Cluster) {
	handsOver(t, c)
	r := root(t, c)
	for i := range r.Status.Root.Shards {
		r.Status.Root.Shards[i].Held = r.Status.Root.Shards[i].Target
	}
	r.Status.Root.Handovers[0].Phase, r.Status.Root.Handovers[0].WaitsFor = "Granting", nil
}

func byCluster(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Spec.Root.Key = v1alpha1.KeyCluster
	r.Spec.Clusters = []v1alpha1.ClusterPath{{PathPrefix: "/clusters/*"}}
}

func byObject(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Spec.Root.Key = v1alpha1.KeyObject
	for i := range r.Status.Root.Shards {
		r.Status.Root.Shards[i].Weight = 0
	}
}

// waits lets no shard own anything.
func waits(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	for i := range r.Status.Root.Shards {
		s := &r.Status.Root.Shards[i]
		s.Held, s.Target, s.Leader = nil, nil, ""
	}
	r.Status.Locks[0].HeldByMesh, r.Status.Locks[0].Holder = false, "od-old-0"
	meshtest.SetCondition(r, v1alpha1.ConditionReady, false, v1alpha1.ReasonHeldOutside, "0 of 2 members ready; lock operator-demo/operator-leader is held by od-old-0 outside the mesh")
}

func damaged(t *testing.T, c *meshtest.Cluster) {
	root(t, c).Status.Root.Shards[0].Held = []string{"nonsense"}
}

func withoutStatus(t *testing.T, c *meshtest.Cluster) {
	root(t, c).Status = v1alpha1.ShardingConfigStatus{}
}

func withoutPods(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Status.Root = nil
	meshtest.SetCondition(r, v1alpha1.ConditionReady, false, v1alpha1.ReasonTargetNotFound, "no pod of StatefulSet operator-demo in namespace operator-demo has the label")
}

func unreachable(_ *testing.T, c *meshtest.Cluster) {
	c.Unreachable = errors.New("dial tcp 127.0.0.1:6443: connect: connection refused")
}

// forbids returns a cluster in which the user may not list some objects.
func forbids(list client.ObjectList, resource string) func(*testing.T, *meshtest.Cluster) {
	return func(_ *testing.T, c *meshtest.Cluster) {
		c.Forbidden = func(of client.ObjectList) error {
			if fmt.Sprintf("%T", of) != fmt.Sprintf("%T", list) {
				return nil
			}
			return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("you may not list it"))
		}
	}
}

func managerDown(t *testing.T, c *meshtest.Cluster) {
	meshtest.Find[*appsv1.Deployment](t, c, snapshot.DefaultNamespace, snapshot.Manager).Status.ReadyReplicas = 0
	for _, name := range []string{snapshot.Manager + "-1", snapshot.Manager + "-2"} {
		meshtest.Unready(meshtest.Find[*corev1.Pod](t, c, snapshot.DefaultNamespace, name))
	}
	meshtest.Find[*coordinationv1.Lease](t, c, snapshot.DefaultNamespace, snapshot.Manager).Spec.RenewTime = new(metav1.NewMicroTime(meshtest.Now.Add(-time.Hour)))
}

func rollsOut(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Status.Root.Rollout = &v1alpha1.RolloutStatus{Revision: "od-2", Phase: v1alpha1.RolloutHalted, Shard: "operator-demo-1-normal", Message: "pod od-0 is not ready"}
	meshtest.SetCondition(r, v1alpha1.ConditionDegraded, true, v1alpha1.ReasonRolloutHalted, "revision od-2, shard operator-demo-1-normal: pod od-0 is not ready")
}

func uninstalled(_ *testing.T, c *meshtest.Cluster) {
	c.Objects = nil
}

// scenario is a command in a cluster with a change.
type scenario struct {
	name   string
	plant  func(*testing.T, *meshtest.Cluster)
	args   string
	code   int
	tables bool // the other formats show nothing more
}

func nothing(*testing.T, *meshtest.Cluster) {}

// requireScenarios compares commands, in all formats, with golden files.
func requireScenarios(t *testing.T, scenarios []scenario) {
	for _, s := range scenarios {
		formats := []string{"table", "json", "yaml"}
		if s.tables {
			formats = formats[:1]
		}
		for _, format := range formats {
			t.Run(s.name+"/"+format, func(t *testing.T) {
				c := meshtest.Healthy(t)
				c.Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-42"}})
				s.plant(t, c)
				r := run(t, c, "", append(strings.Fields(s.args), "-o", format)...)
				assert.Equal(t, s.code, r.code)
				requireGolden(t, s.name+"."+format, r)
			})
		}
	}
}

func TestCommandsAboutOperators(t *testing.T) {
	requireScenarios(t, []scenario{
		{name: "status-healthy", plant: nothing, args: "status"},
		{name: "status-no-leader", plant: losesLeader, args: "status", code: Found},
		{name: "status-manager-down", plant: managerDown, args: "status", code: Found, tables: true},
		{name: "status-no-agent", plant: losesAgent, args: "status", code: Found, tables: true},
		{name: "status-rollout", plant: rollsOut, args: "status", code: Found, tables: true},
		{name: "status-uninstalled", plant: uninstalled, args: "status", code: Found, tables: true},
		{name: "status-unreachable", plant: unreachable, args: "status", code: Unknown, tables: true},
		{name: "status-forbidden", plant: forbids(&corev1.PodList{}, "pods"), args: "status", code: Unknown, tables: true},
		{name: "shards-healthy", plant: nothing, args: "shards operator-demo"},
		{name: "shards-no-leader", plant: losesLeader, args: "shards operator-demo", code: Found},
		{name: "shards-handover", plant: handsOver, args: "shards operator-demo"},
		{name: "shards-object", plant: byObject, args: "shards operator-demo", tables: true},
		{name: "shards-by-hand", plant: nothing, args: "shards by-hand", tables: true},
		{name: "shards-no-leases", plant: forbids(&coordinationv1.LeaseList{}, "leases"), args: "shards operator-demo", tables: true},
		{name: "shards-unknown", plant: nothing, args: "shards other", code: Unknown, tables: true},
		{name: "shards-derived", plant: nothing, args: "shards operator-demo-1-normal", code: Unknown, tables: true},
		{name: "shards-no-status", plant: withoutStatus, args: "shards operator-demo", code: Unknown, tables: true},
		{name: "shards-no-pods", plant: withoutPods, args: "shards operator-demo", code: Found, tables: true},
		{name: "owner-healthy", plant: nothing, args: "owner operator-demo team-42"},
		{name: "owner-releasing", plant: handsOver, args: "owner operator-demo team-42", code: Found},
		{name: "owner-planned", plant: plans, args: "owner operator-demo team-42", tables: true},
		{name: "shards-few-pods", plant: lacksPods, args: "shards operator-demo", code: Found, tables: true},
		{name: "shards-planned", plant: plans, args: "shards operator-demo", tables: true},
		{name: "owner-granting", plant: grants, args: "owner operator-demo team-42", tables: true},
		{name: "owner-no-namespace", plant: nothing, args: "owner operator-demo team-43", tables: true},
		{name: "owner-cluster", plant: byCluster, args: "owner operator-demo --cluster member-1", tables: true},
		{name: "owner-object", plant: byObject, args: "owner operator-demo --uid 0a1b2c3d-0000-4000-8000-000000000000", tables: true},
		{name: "owner-wrong-key", plant: byObject, args: "owner operator-demo team-42", code: Unknown, tables: true},
		{name: "owner-nobody", plant: waits, args: "owner operator-demo team-42", code: Found, tables: true},
		{name: "owner-damaged", plant: damaged, args: "owner operator-demo team-42", code: Unknown, tables: true},
		{name: "owner-no-status", plant: withoutStatus, args: "owner operator-demo team-42", code: Unknown, tables: true},
		{name: "owner-by-hand", plant: nothing, args: "owner by-hand team-42", code: Unknown, tables: true},
		{name: "version", plant: nothing, args: "version"},
		{name: "version-client", plant: unreachable, args: "version --client", tables: true},
		{name: "version-unreachable", plant: unreachable, args: "version", code: Unknown, tables: true},
	})
}

// A leader that releases its lock is followed by one that the manager has not reported yet.
func TestLeaderIsReadFromTheLease(t *testing.T) {
	c := meshtest.Healthy(t)
	lease := meshtest.Find[*coordinationv1.Lease](t, c, meshtest.Operator, "operator-leader---operator-demo-2-normal")
	lease.Spec.HolderIdentity = new("")
	second, err := sharding.Parse(root(t, c).Status.Root.Shards[1].Held)
	require.NoError(t, err)
	for _, namespace := range []string{"a", "b", "c", "d"} {
		r := run(t, c, "", "owner", "operator-demo", namespace)
		if second.Owns(namespace) {
			require.Equal(t, Found, r.code, namespace)
			require.Contains(t, r.out, "no leader")
			continue
		}
		require.Equal(t, Healthy, r.code, namespace)
		require.Contains(t, r.out, "leader od-0 on node-1")
	}
}

// later reads one cluster, and another one after some lists.
type later struct {
	client.Client
	after client.Client
	lists int
}

func (l *later) current() client.Client {
	if l.lists > 5 {
		return l.after
	}
	return l.Client
}

func (l *later) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return l.current().Get(ctx, key, o, opts...)
}

func (l *later) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	l.lists++
	return l.current().List(ctx, list, opts...)
}

func TestStatusWaitsUntilHealthy(t *testing.T) {
	c := meshtest.Healthy(t)
	losesAgent(t, c)
	r := c.Reader(t)
	changes := &later{Client: r.Client, after: meshtest.Healthy(t).Reader(t).Client}
	r.Client = changes
	e := &environment{poll: time.Millisecond}
	status, err := e.status(t.Context(), r, false, time.Minute)
	require.NoError(t, err)
	require.False(t, status.Healthy)
	status, err = e.status(t.Context(), r, true, time.Minute)
	require.NoError(t, err)
	require.True(t, status.Healthy)
	require.Greater(t, changes.lists, 5)
}

func TestStatusStopsWaitingAfterTheTimeout(t *testing.T) {
	c := meshtest.Healthy(t)
	losesAgent(t, c)
	r := run(t, c, "", "status", "--wait", "--timeout=20ms")
	require.Equal(t, Found, r.code)
	require.Contains(t, r.out, "no agent is ready on node-2")
}

func TestWrongCommandLinesExitWithUnknown(t *testing.T) {
	for _, args := range []string{"status -o wide", "shards", "owner", "nothing", "status --nothing", "status more"} {
		r := run(t, meshtest.Healthy(t), "", strings.Fields(args)...)
		require.Equal(t, Unknown, r.code, args)
		require.Contains(t, r.err, "error: ", args)
	}
}

func TestCompletionIsWritten(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		r := run(t, meshtest.Healthy(t), "", "completion", shell)
		require.Equal(t, Healthy, r.code)
		require.Contains(t, r.out, "kubectl-ctrlmesh", shell)
	}
}

func TestClockFollowsTheApiserver(t *testing.T) {
	here := time.Now()
	var c clock
	c.set(here.Add(time.Second).UTC().Format(time.RFC1123), here)
	require.Zero(t, c.ahead.Load(), "a date has no parts of seconds")
	c.set(strings.Replace(here.Add(-time.Hour).UTC().Format(time.RFC1123), "UTC", "GMT", 1), here)
	require.InDelta(t, -time.Hour.Seconds(), time.Duration(c.ahead.Load()).Seconds(), 2)
	c.set("nonsense", here)
	require.NotZero(t, c.ahead.Load())
}

func TestEveryCommandIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../../docs/commands.md")
	require.NoError(t, err)
	for _, c := range newEnvironment(genericiooptions.IOStreams{}, "v0").root().Commands() {
		require.Contains(t, string(text), "\n## "+c.Name()+"\n")
	}
}
