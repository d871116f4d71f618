package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// team is a namespace with an operator outside the mesh: StatefulSet tally of two pods.
const team = "team"

const tallyRoot = `apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: tally}
spec:
  controller: {leaderElectionName: tally}
  root:
    prefix: tally
    targetRef: {kind: StatefulSet, name: tally}
    auto: {shardingSize: 2, everyShardReplicas: 1}
    resourceSelector: [{relateResources: [{apiGroups: [example.com], resources: [tallies]}]}]
`

// outsideTheMesh returns a cluster with the operator. The user may write.
func outsideTheMesh(t *testing.T) *meshtest.Cluster {
	c := meshtest.Healthy(t)
	c.Refuse = func(string, client.Object) error { return nil }
	labels := map[string]string{"app": "tally"}
	c.Add(&appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "tally"},
		Spec:       appsv1.StatefulSetSpec{Replicas: new(int32(2)), Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}},
	}, tallyPod("tally-0", labels), tallyPod("tally-1", labels))
	return c
}

func tallyPod(name string, labels map[string]string) *corev1.Pod {
	pod := meshtest.Pod(team, name, "node-1")
	pod.Labels = labels
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "tally", Controller: new(true)}}
	return pod
}

// controllers act as the controller of StatefulSets and the manager: before each snapshot they do one
// thing, once something changed at all.
type controllers struct {
	t *testing.T
	// idle keeps them from acting.
	idle bool
	// reverts removes the label again.
	reverts bool
	// lockless is an operator that elects no leader.
	lockless bool
}

func (m *controllers) advance(c client.Client) {
	ctx := context.Background()
	var set appsv1.StatefulSet
	require.NoError(m.t, c.Get(ctx, client.ObjectKey{Namespace: team, Name: "tally"}, &set))
	root := &v1alpha1.ShardingConfig{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: team, Name: "tally"}, root); err != nil {
		require.True(m.t, apierrors.IsNotFound(err), "%v", err)
		root = nil
	}
	switch {
	case m.idle:
	case m.reverts && set.Spec.Template.Labels[v1alpha1.EnableProxyLabel] != "":
		delete(set.Spec.Template.Labels, v1alpha1.EnableProxyLabel)
		require.NoError(m.t, c.Update(ctx, &set))
	case root != nil && root.DeletionTimestamp != nil:
		if m.withdraws(ctx, c, root) {
			return
		}
		root.Finalizers = nil
		require.NoError(m.t, c.Update(ctx, root))
	case m.replaces(ctx, c, &set):
		if root != nil {
			m.reports(ctx, c, root, v1alpha1.ReasonHeldOutside, "lock team/tally is held outside the mesh by tally-0")
		}
	case root != nil && set.Spec.Template.Labels[v1alpha1.EnableProxyLabel] != "":
		m.settles(ctx, c, root)
	}
}

// replaces replaces the pod with the highest ordinal that lacks the labels of the template.
func (m *controllers) replaces(ctx context.Context, c client.Client, set *appsv1.StatefulSet) bool {
	for _, name := range []string{"tally-1", "tally-0"} {
		var pod corev1.Pod
		require.NoError(m.t, c.Get(ctx, client.ObjectKey{Namespace: team, Name: name}, &pod))
		if len(pod.Labels) == len(set.Spec.Template.Labels) {
			continue
		}
		require.NoError(m.t, c.Delete(ctx, &pod))
		require.NoError(m.t, c.Create(ctx, tallyPod(name, set.Spec.Template.Labels)))
		return true
	}
	return false
}

func (m *controllers) reports(ctx context.Context, c client.Client, root *v1alpha1.ShardingConfig, reason v1alpha1.Reason, message string) {
	root.Finalizers = []string{v1alpha1.HandoverFinalizer}
	root.Status.ObservedGeneration = root.Generation
	meshtest.SetCondition(root, v1alpha1.ConditionReady, reason == v1alpha1.ReasonSettled, reason, message)
	require.NoError(m.t, c.Update(ctx, root))
}

// settles divides the operator. A shard gets its leader after the root is settled.
func (m *controllers) settles(ctx context.Context, c client.Client, root *v1alpha1.ShardingConfig) {
	if root.Status.Shards == 2 {
		for i, shard := range []string{"tally-1-normal", "tally-2-normal"} {
			err := c.Create(ctx, meshtest.Lease(team, "tally---"+shard, fmt.Sprintf("tally-%d_1", i)))
			require.NoError(m.t, client.IgnoreAlreadyExists(err))
		}
		return
	}
	root.Status.Shards = 2
	if !m.lockless {
		root.Status.Locks = []v1alpha1.LockStatus{{Namespace: team, Name: "tally", HeldByMesh: true}}
	}
	root.Status.Root = &v1alpha1.RootStatus{}
	for i, shard := range []string{"tally-1-normal", "tally-2-normal"} {
		name := fmt.Sprintf("tally-%d", i)
		root.Status.Root.Shards = append(root.Status.Root.Shards, v1alpha1.ShardStatus{Name: shard, Held: []string{meshtest.Halves[i]}, Members: 1, ReadyMembers: 1})
		root.Status.Root.Assignments = append(root.Status.Root.Assignments, v1alpha1.Assignment{UID: "uid-" + name, Name: name, Node: "node-1", Shard: shard})
	}
	m.reports(ctx, c, root, v1alpha1.ReasonSettled, "2 of 2 members ready in 2 shards")
}

// withdraws reports once that the root is withdrawn.
func (m *controllers) withdraws(ctx context.Context, c client.Client, root *v1alpha1.ShardingConfig) bool {
	for _, is := range root.Status.Conditions {
		if is.Reason == string(v1alpha1.ReasonWithdrawing) {
			return false
		}
	}
	m.reports(ctx, c, root, v1alpha1.ReasonWithdrawing, "the shards are being withdrawn, waiting for pod tally-1")
	return true
}

// clusterOf returns a cluster with the operator, whose controllers work.
func clusterOf(t *testing.T) (*meshtest.Cluster, *controllers) {
	c, m := outsideTheMesh(t), &controllers{t: t}
	c.Advance = m.advance
	return c, m
}

func TestAdoptAndRemove(t *testing.T) {
	for _, format := range []string{"table", "json"} {
		t.Run(format, func(t *testing.T) {
			c, _ := clusterOf(t)
			step := func(name string, writes []string, args string) {
				c.Written = nil
				r := run(t, c, tallyRoot, append(strings.Fields(args), "-n", team, "-o", format)...)
				assert.Equal(t, Healthy, r.code, "%s", r)
				assert.Equal(t, writes, c.Written)
				requireGolden(t, name+"."+format, r)
			}
			step("adopt-dry-run", nil, "adopt sts/tally -f - --dry-run")
			step("adopt-done", []string{"create *v1alpha1.ShardingConfig tally", "patch *v1.StatefulSet tally"}, "adopt sts/tally -f -")
			step("adopt-again", nil, "adopt sts/tally -f -")
			step("adopt-without-file", nil, "adopt sts/tally")
			step("adopt-dry-run-again", nil, "adopt sts/tally -f - --dry-run")
			step("remove-dry-run", nil, "remove tally --dry-run")
			step("remove-done", []string{"delete *v1alpha1.ShardingConfig tally", "patch *v1.StatefulSet tally"}, "remove tally")
			step("remove-again", nil, "remove sts/tally")
		})
	}
}

// An adoption that was interrupted goes on where it was.
func TestAdoptGoesOnWhereItWas(t *testing.T) {
	t.Parallel() // it waits for timeouts
	c, m := clusterOf(t)
	m.idle = true
	r := run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team, "--timeout=2s")
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "! 0 of 2 pods are replaced; old: tally-0, tally-1\n  kubectl -n team describe statefulset/tally\ntimed out after 2s; run the same command to go on\n")
	m.idle, c.Written = false, nil
	r = run(t, c, "", "adopt", "sts/tally", "-n", team)
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Empty(t, c.Written)
	require.Contains(t, r.out, "leaders: tally-0, tally-1\n")

	m.idle = true
	r = run(t, c, "", "remove", "tally", "-n", team, "--timeout=2s")
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "ShardingConfig tally is being deleted")
	require.Contains(t, r.out, "run kubectl ctrlmesh remove statefulset/tally -n team to go on")
	m.idle = false
	r = run(t, c, "", "remove", "sts/tally", "-n", team)
	require.Equal(t, Healthy, r.code, "%s", r)
}

func TestAdoptMakesTheRoot(t *testing.T) {
	c, _ := clusterOf(t)
	meshtest.Find[*appsv1.StatefulSet](t, c, team, "tally").Spec.Replicas = new(int32(5))
	r := run(t, c, "", "adopt", "sts/tally", "--shards=2", "--resources=example.com/tallies,configmaps", "-n", team, "--dry-run")
	require.Equal(t, Healthy, r.code, "%s", r)
	requireGolden(t, "adopt-made.table", r)
}

func TestAdoptDryRunOfObservedOperator(t *testing.T) {
	c := outsideTheMesh(t)
	meshtest.Find[*appsv1.StatefulSet](t, c, team, "tally").Spec.Template.Labels = map[string]string{"app": "tally", v1alpha1.EnableProxyLabel: "true"}
	r := run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team, "--dry-run")
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "# 1. Create the root. Its pods are on the mesh already, and the manager replaces them one by one.\n")
	require.NotContains(t, r.out, "patch statefulset/tally")
}

func TestAdoptRefuses(t *testing.T) {
	denied := apierrors.NewForbidden(schema.GroupResource{Resource: "shardingconfigs"}, "tally", errors.New("admission webhook \"shardingconfigs.ctrlmesh.kusionstack.io\" denied the request: divide something else"))
	for name, c := range map[string]struct {
		plant func(*testing.T, *meshtest.Cluster)
		in    string
		args  string
		code  int
		want  string
	}{
		"no workload":            {args: "adopt sts/none -f -", code: Unknown, want: "there is no StatefulSet none in namespace team"},
		"another kind":           {args: "adopt deploy/tally -f -", code: Unknown, want: "there is no Deployment tally"},
		"no kind":                {args: "adopt tally -f -", code: Unknown, want: "name it as statefulset/NAME"},
		"no root":                {args: "adopt sts/tally", code: Found, want: "name one by -f"},
		"both roots":             {args: "adopt sts/tally -f - --shards 2", code: Unknown, want: "-f excludes"},
		"no resources":           {args: "adopt sts/tally --shards 2", code: Unknown, want: "name both"},
		"no shards":              {args: "adopt sts/tally --resources a/b", code: Unknown, want: "name both"},
		"a wrong resource":       {args: "adopt sts/tally --shards 2 --resources a/b/c", code: Unknown, want: "invalid resource"},
		"no file":                {args: "adopt sts/tally -f /does/not/exist", code: Unknown, want: "no such file"},
		"other objects":          {in: tallyRoot + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n", args: "adopt sts/tally -f -", code: Unknown, want: "nothing else"},
		"no YAML":                {in: "a: b: c", args: "adopt sts/tally -f -", code: Unknown, want: "parsing document 1"},
		"other target":           {in: strings.Replace(tallyRoot, "StatefulSet, name: tally", "StatefulSet, name: other", 1), args: "adopt sts/tally -f -", code: Unknown, want: "does not name StatefulSet tally"},
		"other namespace":        {in: strings.Replace(tallyRoot, "{name: tally}", "{name: tally, namespace: other}", 1), args: "adopt sts/tally -f -", code: Unknown, want: "is in namespace other"},
		"what lint refuses":      {in: strings.Replace(tallyRoot, "tallies", "tallies/status", 1), args: "adopt sts/tally -f -", code: Found, want: "! ShardingConfig tally: "},
		"unknown field":          {in: strings.Replace(tallyRoot, "    prefix", "    colour: red\n    prefix", 1), args: "adopt sts/tally -f -", code: Found, want: "spec.root.colour: unknown field"},
		"few replicas":           {in: strings.Replace(tallyRoot, "shardingSize: 2", "shardingSize: 3", 1), args: "adopt sts/tally -f -", code: Found, want: "kubectl -n team scale statefulset/tally --replicas=3"},
		"no agent":               {plant: losesAgent, args: "adopt sts/tally -f -", code: Found, want: "agents are ready on 1 of 2 nodes"},
		"an unknown resource":    {in: strings.Replace(tallyRoot, "[tallies]", "[tally]", 1), args: "adopt sts/tally -f -", code: Found, want: "! tally.example.com: the apiserver serves no such resource; did you mean tallies?: correct spec.root.resourceSelector"},
		"a forgotten group":      {args: "adopt sts/tally --shards 2 --resources tallies", code: Found, want: `did you mean tallies of group "example.com"?`},
		"admission":              {plant: refuses("create", denied), args: "adopt sts/tally -f -", code: Found, want: "divide something else"},
		"admission of the label": {plant: refuses("patch", denied), args: "adopt sts/tally -f -", code: Found, want: "label the pod template of StatefulSet tally"},
		"broken connection":      {plant: refuses("create", errors.New("connection reset")), args: "adopt sts/tally -f -", code: Unknown, want: "check the connection"},
		"no permission":          {plant: mayNot("statefulsets"), args: "adopt sts/tally -f -", code: Unknown, want: "you may not patch statefulsets.apps in namespace team"},
		"unreachable":            {plant: unreachable, args: "adopt sts/tally -f -", code: Unknown, want: "connection refused"},
		"forbidden":              {plant: forbids(&corev1.PodList{}, "pods"), args: "adopt sts/tally -f -", code: Unknown, want: "you may not list it"},
	} {
		t.Run(name, func(t *testing.T) {
			cluster := outsideTheMesh(t)
			if c.plant != nil {
				c.plant(t, cluster)
			}
			in := c.in
			if in == "" {
				in = tallyRoot
			}
			r := run(t, cluster, in, append(strings.Fields(c.args), "-n", team)...)
			require.Equal(t, c.code, r.code, "%s", r)
			require.Contains(t, r.out+r.err, c.want)
			require.Empty(t, cluster.Written)
		})
	}
}

func refuses(verb string, with error) func(*testing.T, *meshtest.Cluster) {
	return func(_ *testing.T, c *meshtest.Cluster) {
		c.Refuse = func(is string, _ client.Object) error {
			if is == verb {
				return with
			}
			return nil
		}
	}
}

func mayNot(resource string) func(*testing.T, *meshtest.Cluster) {
	return func(_ *testing.T, c *meshtest.Cluster) {
		c.MayCreate = func(is string) bool { return is != resource }
	}
}

func TestAdoptRefusesASpecOfItsOwn(t *testing.T) {
	c, _ := clusterOf(t)
	require.Equal(t, Healthy, run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team).code)
	c.Written = nil
	other := strings.Replace(tallyRoot, "tallies", "others", 1)
	r := run(t, c, other, "adopt", "sts/tally", "-f", "-", "-n", team)
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "exists with another spec")
	require.Empty(t, c.Written)
}

func TestAdoptStopsIfItsLabelIsReverted(t *testing.T) {
	c, m := clusterOf(t)
	m.reverts = true
	r := run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team)
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "something reverts this change: label the pod template")
	require.Len(t, c.Written, 1+maxRepeats)
}

func TestAdoptOperatorWithoutElection(t *testing.T) {
	c, m := clusterOf(t)
	m.lockless = true
	r := run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team)
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "2 shards; leaders: none, because the mesh knows no lock of the operator\n")
}

func TestAdoptReportsAWriteThatFails(t *testing.T) {
	c := outsideTheMesh(t)
	writes := 0
	c.Refuse = func(string, client.Object) error {
		if writes++; writes > 2 { // after the dry runs
			return errors.New("the disk is full")
		}
		return nil
	}
	r := run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team)
	require.Equal(t, Unknown, r.code, "%s", r)
	require.Contains(t, r.err, "create ShardingConfig tally: the disk is full: fix it, then run the same command to go on")
}

func TestAdoptWaitsThroughErrorsOfReads(t *testing.T) {
	c, m := clusterOf(t)
	reads := 0
	c.Advance = func(of client.Client) {
		reads++
		if c.Unreachable = nil; reads%3 == 0 {
			c.Unreachable = errors.New("the apiserver restarts")
		}
		m.advance(of)
	}
	r := run(t, c, tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team)
	require.Equal(t, Healthy, r.code, "%s", r)
	require.Contains(t, r.out, "the apiserver restarts")
}

func TestAdoptSaysThatItWasInterrupted(t *testing.T) {
	c, m := clusterOf(t)
	m.idle = true
	r := runUntil(t, c, "0 of 2 pods are replaced", tallyRoot, "adopt", "sts/tally", "-f", "-", "-n", team)
	require.Equal(t, Unknown, r.code, "%s", r)
	require.Contains(t, r.err, "interrupted, waiting for this: 0 of 2 pods are replaced")
}

func TestRemoveRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"remove by-hand":                       "is a hand-written shard",
		"remove none":                          "there is no ShardingConfig none",
		"remove sts/none":                      "there is no StatefulSet none",
		"remove ds/none":                       "name it as statefulset/NAME",
		"remove operator-demo-1-normal":        "name the root",
		"remove operator-demo --namespace=not": "there is no ShardingConfig operator-demo in namespace not",
	} {
		c := meshtest.Healthy(t)
		r := run(t, c, "", strings.Fields(args)...)
		require.Equal(t, Unknown, r.code, "%s: %s", args, r)
		require.Contains(t, r.err, want)
	}
	c := outsideTheMesh(t)
	meshtest.Find[*appsv1.StatefulSet](t, c, team, "tally").Spec.Template.Labels = map[string]string{"app": "tally", v1alpha1.EnableProxyLabel: "true"}
	mayNot("statefulsets")(t, c)
	r := run(t, c, "", "remove", "sts/tally", "-n", team)
	require.Equal(t, Unknown, r.code, "%s", r)
	require.Contains(t, r.err, "you may not patch statefulsets.apps")
}

func TestRemoveShowsWhatAdmissionRefuses(t *testing.T) {
	c := meshtest.Healthy(t)
	refuses("delete", apierrors.NewForbidden(schema.GroupResource{Resource: "shardingconfigs"}, "operator-demo", errors.New("production is frozen")))(t, c)
	r := run(t, c, "", "remove", "operator-demo")
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "! the apiserver refuses it (delete the ShardingConfig of StatefulSet operator-demo): ")
	require.Contains(t, r.out, "production is frozen")
	require.Empty(t, c.Written)
}

func TestAdoptDeployment(t *testing.T) {
	t.Parallel() // it waits for a timeout
	c := outsideTheMesh(t)
	labels := map[string]string{"app": "web", v1alpha1.EnableProxyLabel: "true"}
	c.Add(&appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "web"},
		Spec:       appsv1.DeploymentSpec{Paused: true, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}}},
	})
	for name, hash := range map[string]string{"web-a-1": "a", "other-b-1": "b"} {
		pod := meshtest.Pod(team, name, "node-1")
		pod.Labels = map[string]string{"app": "web", "pod-template-hash": hash}
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: strings.TrimSuffix(name, "-1"), Controller: new(true)}}
		c.Add(pod)
	}
	file := filepath.Join(t.TempDir(), "web.yaml")
	text := strings.NewReplacer("tally", "web", "StatefulSet", "Deployment", "shardingSize: 2", "shardingSize: 1").Replace(tallyRoot)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	r := run(t, c, "", "adopt", "deployment/web", "-f", file, "-n", team, "--timeout=2s")
	require.Equal(t, Found, r.code, "%s", r)
	require.Contains(t, r.out, "old: web-a-1; it is paused: kubectl -n team rollout resume deployment/web")
	require.Equal(t, []string{"create *v1alpha1.ShardingConfig web"}, c.Written)
}

func TestWarningsOfAdmissionAreShown(t *testing.T) {
	var w warnings
	w.HandleWarningHeader(299, "-", "the default subset owns all namespaces")
	w.HandleWarningHeader(199, "-", "of a proxy")
	w.HandleWarningHeader(299, "-", "")
	require.Equal(t, []string{"the default subset owns all namespaces"}, w.take())
	require.Empty(t, w.take())

	c := outsideTheMesh(t)
	var errs bytes.Buffer
	e := newEnvironment(genericiooptions.IOStreams{In: strings.NewReader(tallyRoot), Out: io.Discard, ErrOut: &errs}, "v0")
	e.connect = func() (snapshot.Reader, string, error) { return c.Reader(t), team, nil }
	c.Refuse = func(verb string, _ client.Object) error {
		e.warnings.HandleWarningHeader(299, "-", "think about "+verb)
		return nil
	}
	require.Equal(t, Healthy, e.run(t.Context(), []string{"adopt", "sts/tally", "-f", "-", "--dry-run"}), errs.String())
	require.Equal(t, "warning: think about create\nwarning: think about patch\n", errs.String())
}
