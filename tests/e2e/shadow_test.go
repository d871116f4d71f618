package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// TestShadowWritesNothing runs a version of an operator as a shadow beside the present one, which
// is outside the mesh. Each version records its pod in each object: that is what they differ in.
func TestShadowWritesNothing(t *testing.T) {
	t.Parallel()
	op := &tally{namespace: namespace(t, "shadow")}
	probeRights(t, op.namespace)
	owned := namespace(t, "owned")
	mark, err := cluster.Mark()
	require.NoError(t, err)

	create(t, op.version("present", owned, false))
	until(t, "the present version to be ready", func(ctx context.Context) error {
		return cluster.RolledOut(ctx, &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: op.namespace, Name: "present"}})
	})
	config := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: op.namespace, Name: "next"},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector:   &metav1.LabelSelector{MatchLabels: map[string]string{"app": "next"}},
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: tallyLock},
			Shadow:     &meshv1alpha1.Shadow{Window: "3s", IgnoredFields: []string{"status.generations", "status.reconciles", "status.reconciledBy"}},
		},
	}
	create(t, config)
	create(t, op.version("next", owned, true))
	for i := range 5 {
		create(t, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: owned, Name: fmt.Sprintf("t-%d", i), Labels: map[string]string{"of": owned}}})
	}
	compared := op.shadows(t, "writes that agree", func(s *meshv1alpha1.ShadowStatus) bool { return s.Agreed >= 5 })
	require.Equal(t, "next-0", leaderPod(op.leads(t, &tallyShard{name: "next"}, "")))
	require.Zero(t, compared.Differed, "%+v", compared)
	require.Zero(t, compared.Refused, "%+v", compared)

	require.NoError(t, cluster.Get(t.Context(), client.ObjectKeyFromObject(config), config))
	before := config.DeepCopy()
	config.Spec.Shadow.IgnoredFields = nil
	require.NoError(t, cluster.Patch(t.Context(), config, client.MergeFrom(before)))
	// A write before the new policy applies agrees, and a slow machine does not compare all: change them again.
	var said time.Time
	compared = op.shadows(t, "writes that differ", func(s *meshv1alpha1.ShadowStatus) bool {
		if time.Since(said) > 10*time.Second { // more than the window
			said = time.Now()
			op.say(t, owned, said.String())
		}
		return len(s.Differences) == 1 && s.Differences[0].Writes >= 5
	})
	found := compared.Differences[0]
	require.Equal(t, []string{"status.generations.next-0", "status.reconciledBy[]", "status.reconciles.next-0"}, found.Fields)
	require.Equal(t, "tallies/status update", found.Resource+" "+found.Verb)

	pod := op.namespace + "/next-0"
	requests, err := cluster.PodRequests(mark, pod)
	require.NoError(t, err)
	tried := 0
	for _, r := range requests {
		switch {
		case !r.Writes(), strings.Contains(r.URI, "/leases/"+tallyLock+"---next"), strings.HasSuffix(strings.Split(r.URI, "?")[0], "/leases"):
		case r.DryRun():
			tried++
		default:
			require.Fail(t, never, "%s", r)
		}
	}
	require.NotZero(t, tried)
	var all tallyv1.TallyList
	require.NoError(t, cluster.List(t.Context(), &all, client.InNamespace(owned)))
	for _, one := range all.Items {
		require.NotContains(t, one.Status.ReconciledBy, "next-0")
	}

	// Nothing selects the pod any more, and it must not begin to write.
	require.NoError(t, cluster.Delete(t.Context(), config))
	clientset, err := kubernetes.NewForConfig(from(t, ready(t, op.namespace, "next-0")))
	require.NoError(t, err)
	until(t, "the pod to be refused", func(ctx context.Context) error {
		_, err := clientset.CoreV1().ConfigMaps(owned).List(ctx, metav1.ListOptions{})
		if err != nil && strings.Contains(err.Error(), "no ShardingConfig selects it") {
			return nil
		}
		return errors.Join(errors.New("it is not"), err)
	})
}

// TestShadowOfAShard runs a shadow of one of two shards. It sees what its shard sees, also after that has
// got another namespace, and writes nothing. Its configuration names the shard wrongly at first.
func TestShadowOfAShard(t *testing.T) {
	t.Parallel()
	tenants := newTenants(t, 8)
	tenants.fill(t, "cm")
	r := newRoot(t, "e2e-shadow-of", 2, meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
		Prefix:            "shown", // the label of a namespace below concerns all roots with such a shard
		TargetStatefulSet: workload,
		OnChange:          meshv1alpha1.OnChangeRelist,
		Auto:              &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
	}})
	r.settles(t, 2)
	shadow := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.home, Name: "next"},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{podNameLabel: "next"}},
			Shadow:   &meshv1alpha1.Shadow{Of: "shown-1-norml"},
		},
	}
	create(t, shadow, probe(r.home, "next", true))
	reports(t, shadow, meshv1alpha1.ReasonUnknownShard, "shown-1-norml")
	pod := ready(t, r.home, "next")
	clientset, err := kubernetes.NewForConfig(from(t, pod))
	require.NoError(t, err)
	_, err = clientset.CoreV1().ConfigMaps("").List(t.Context(), metav1.ListOptions{})
	require.ErrorContains(t, err, "no root in namespace "+r.home+" has a shard shown-1-norml")

	before := shadow.DeepCopy()
	shadow.Spec.Shadow.Of = "shown-1-normal"
	require.NoError(t, cluster.Patch(t.Context(), shadow, client.MergeFrom(before)))
	reports(t, shadow, meshv1alpha1.ReasonAllReady, "")
	store := storeIn(t, pod, tenants.selector())
	pods := r.pods(t, 2)
	lists := func(pod *corev1.Pod) []string { return tenants.listed(t, pod) }
	follows := func() {
		t.Helper()
		has(t, "the shadow's informer", store, lists(pods[0]))
	}
	follows()

	for ns, owner := range tenants.divided(t, 1, pods, lists) {
		_, err := clientset.CoreV1().ConfigMaps(ns).Patch(t.Context(), "cm", types.MergePatchType, []byte(`{"data":{"by":"shadow"}}`), metav1.PatchOptions{})
		if owner == pods[0].Name {
			require.NoError(t, err)
		} else {
			require.True(t, apierrors.IsForbidden(err), "%v", err)
		}
		is := &corev1.ConfigMap{}
		require.NoError(t, cluster.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "cm"}, is))
		require.Empty(t, is.Data, never)
	}
	moved := tenants[slices.IndexFunc(tenants, func(ns string) bool { return !slices.Contains(store.ListKeys(), ns+"/cm") })]
	labelNamespace(t, moved, meshv1alpha1.OwnerShardLabel, "shown-1-normal")
	until(t, "the shard to own "+moved, func(context.Context) error {
		return orElse(slices.Contains(lists(pods[0]), moved+"/cm"), "it does not")
	})
	follows()
}

// version returns a version of the operator, as a StatefulSet with one pod, that reconciles the
// objects labelled for a test.
func (op *tally) version(name, of string, meshed bool) *appsv1.StatefulSet {
	set := op.workload(name)
	set.Spec.Replicas = new(int32(1))
	last := &set.Spec.Template.Spec.Containers[len(set.Spec.Template.Spec.Containers)-1]
	last.Args = append(last.Args, "-selector=of="+of)
	if !meshed {
		delete(set.Spec.Template.Labels, meshv1alpha1.EnableProxyLabel)
	}
	return set
}

// say changes all objects in a namespace.
func (op *tally) say(t *testing.T, namespace, what string) {
	t.Helper()
	var all tallyv1.TallyList
	require.NoError(t, cluster.List(t.Context(), &all, client.InNamespace(namespace)))
	for i := range all.Items {
		before := all.Items[i].DeepCopy()
		all.Items[i].Spec.Say = what
		require.NoError(t, cluster.Patch(t.Context(), &all.Items[i], client.MergeFrom(before)))
	}
}

// shadows waits until the status of ShardingConfig next, which is Ready, says something of its
// writes.
func (op *tally) shadows(t *testing.T, what string, says func(*meshv1alpha1.ShadowStatus) bool) *meshv1alpha1.ShadowStatus {
	t.Helper()
	c := &meshv1alpha1.ShardingConfig{}
	until(t, what, func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKey{Namespace: op.namespace, Name: "next"}, c)
		if err == nil && (c.Status.Shadow == nil || !says(c.Status.Shadow) || !apimeta.IsStatusConditionTrue(c.Status.Conditions, meshv1alpha1.ConditionReady)) {
			err = fmt.Errorf("%+v %+v", c.Status.Shadow, c.Status.Conditions)
		}
		return err
	})
	return c.Status.Shadow
}
