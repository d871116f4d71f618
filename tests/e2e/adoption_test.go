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
	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/real/trial"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// Kubernetes' own controllers are adopted in place, sharded, deprived of a leader and
// removed, while their objects change. Until the test ends, the cluster's controller manager
// runs without the controllers under test, so those of other tests may have to wait.
//
// It takes longest, so it is the first of the parallel tests, which begin about in the order of
// the source: else it would end long after the others.
func TestKubeControllerManager(t *testing.T) {
	t.Parallel()
	operator, err := trial.Build(t.Context(), cluster, trial.Find(trial.KubeControllerManager))
	require.NoError(t, err)
	result, err := trial.Run(t.Context(), cluster, operator, trial.Schedule{
		Churn: 3 * time.Second, Sizes: []int32{2}, Kill: true, Say: t.Logf,
	})
	require.NoError(t, err)
	require.Zero(t, result.TwoOwners, "%s: %s", never, result)
	require.True(t, result.OK(), "%s", result)
	require.NotZero(t, result.OutsideWrites, "it was at work before it was adopted")
}

// running is an operator that runs outside the mesh: two replicas of tests/operators/tally,
// which reconciles the objects with its own label in four namespaces.
type running struct {
	home, kind string
	lock       types.NamespacedName
	owned      []string
	said       int
}

func newRunning(t *testing.T, kind string, lock types.NamespacedName) *running {
	t.Helper()
	op := &running{home: namespace(t, "adopted"), kind: kind, lock: lock}
	if op.lock.Name == "" {
		op.lock = types.NamespacedName{Namespace: op.home, Name: tallyLock}
	}
	if op.lock.Namespace == op.home {
		probeRights(t, op.home)
	} else {
		op.rightsByName(t)
	}
	for range 4 {
		ns := namespace(t, "owned")
		op.owned = append(op.owned, ns)
		for i := range 3 {
			create(t, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("t-%d", i), Labels: map[string]string{"operator": op.home}}})
		}
	}
	create(t, op.workload())
	op.rolledOut(t)
	t.Cleanup(func() { // it works in other namespaces too
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := cluster.Delete(ctx, op.object(), client.PropagationPolicy(metav1.DeletePropagationForeground)); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	})
	return op
}

// rightsByName gives the operator the rights that charts commonly do: those on its lock name it.
func (op *running) rightsByName(t *testing.T) {
	t.Helper()
	owners, err := cluster.OwnedBy(t.Context(), op.home)
	require.NoError(t, err)
	subjects := []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: op.home, Name: probeAccount}}
	leases := func(verbs ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: verbs}
	}
	named := leases("get", "update", "patch")
	named.ResourceNames = []string{op.lock.Name}
	locks := metav1.ObjectMeta{Namespace: op.lock.Namespace, Name: op.home}
	role := &rbacv1.Role{ObjectMeta: locks, Rules: []rbacv1.PolicyRule{
		leases("create"), named, {APIGroups: []string{"", "events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	}}
	binding := &rbacv1.RoleBinding{ObjectMeta: locks, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name}, Subjects: subjects}
	create(t,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: op.home, Name: probeAccount}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: op.home, OwnerReferences: owners},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "tally"}, Subjects: subjects,
		}, role, binding)
	t.Cleanup(func() {
		for _, o := range []client.Object{binding, role} {
			if err := cluster.Delete(context.Background(), o); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		}
	})
}

func (op *running) workload() client.Object {
	set := (&tally{namespace: op.home}).workload("tally")
	template := set.Spec.Template
	template.Labels = map[string]string{"app": "tally"}
	template.Spec.Containers = template.Spec.Containers[1:] // the operator alone
	operator := &template.Spec.Containers[0]
	operator.Args = []string{"-lock=" + op.lock.Name, "-lock-namespace=" + op.lock.Namespace, "-selector=operator=" + op.home, "-workers=2"}
	operator.ReadinessProbe = nil
	meta := metav1.ObjectMeta{Namespace: op.home, Name: "tally"}
	if op.kind == "Deployment" {
		return &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Replicas: new(int32(2)), Selector: set.Spec.Selector, Template: template}}
	}
	set.Spec.PodManagementPolicy = appsv1.OrderedReadyPodManagement
	set.Spec.Template = template
	return set
}

func (op *running) object() client.Object {
	meta := metav1.ObjectMeta{Namespace: op.home, Name: "tally"}
	if op.kind == "Deployment" {
		return &appsv1.Deployment{ObjectMeta: meta}
	}
	return &appsv1.StatefulSet{ObjectMeta: meta}
}

// rolledOut waits until all pods are current and ready, and no earlier one runs.
func (op *running) rolledOut(t *testing.T) {
	t.Helper()
	until(t, "the rollout of the operator", func(ctx context.Context) error {
		if err := cluster.RolledOut(ctx, op.object()); err != nil {
			return err
		}
		var pods corev1.PodList
		err := cluster.List(ctx, &pods, client.InNamespace(op.home), client.MatchingLabels{"app": "tally"})
		for _, p := range pods.Items {
			if p.DeletionTimestamp != nil {
				err = errors.Join(err, fmt.Errorf("pod %s is terminating", p.Name))
			}
		}
		return err
	})
}

// label sets or removes the label of the mesh on the pod template. A StatefulSet keeps its
// pods below partition as they are.
func (op *running) label(t *testing.T, on bool, partition int) {
	t.Helper()
	value := `"true"`
	if !on {
		value = "null"
	}
	strategy := ""
	if op.kind != "Deployment" {
		strategy = fmt.Sprintf(`"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": %d}},`, partition)
	}
	patch := fmt.Appendf(nil, `{"spec": {%s "template": {"metadata": {"labels": {%q: %s}}}}}`, strategy, meshv1alpha1.EnableProxyLabel, value)
	require.NoError(t, cluster.Patch(t.Context(), op.object(), client.RawPatch(types.MergePatchType, patch)))
}

// adopt applies a root of two shards, with locks in addition to the one in its own namespace.
func (op *running) adopt(t *testing.T, locks ...meshv1alpha1.LockReference) {
	t.Helper()
	c := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: op.home, Name: "tally"},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Root: &meshv1alpha1.RootConfig{
				Prefix:    "tally",
				TargetRef: &meshv1alpha1.TargetRef{Kind: op.kind, Name: "tally"},
				Auto:      &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
				ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
					{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}},
				}}},
			},
		},
	}
	if len(locks) > 0 {
		c.Spec.Controller = &meshv1alpha1.ControllerConfig{Locks: locks}
	}
	if op.lock.Namespace == op.home {
		c.Spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: op.lock.Name}
	}
	create(t, c)
}

func (op *running) root(ctx context.Context) (*meshv1alpha1.ShardingConfig, error) {
	c := &meshv1alpha1.ShardingConfig{}
	return c, cluster.Get(ctx, client.ObjectKey{Namespace: op.home, Name: "tally"}, c)
}

// is waits until the root's Ready condition is as given.
func (op *running) is(t *testing.T, status metav1.ConditionStatus, reasons ...string) *meshv1alpha1.ShardingConfig {
	t.Helper()
	var root *meshv1alpha1.ShardingConfig
	until(t, fmt.Sprintf("the root to be %s %v", status, reasons), func(ctx context.Context) error {
		c, err := op.root(ctx)
		if err != nil {
			return err
		}
		ready := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionReady)
		if ready == nil || ready.ObservedGeneration < c.Generation || ready.Status != status || !slices.Contains(reasons, ready.Reason) {
			return fmt.Errorf("%+v %+v", ready, c.Status.Locks)
		}
		root = c
		return nil
	})
	return root
}

// works changes all objects, and requires that each is reconciled by exactly one pod. It
// returns those pods.
func (op *running) works(t *testing.T) (by []string) {
	t.Helper()
	op.said++
	say := fmt.Sprintf("round %d", op.said)
	for _, obj := range op.objects(t) {
		before := obj.DeepCopy()
		obj.Spec.Say = say
		require.NoError(t, cluster.Patch(t.Context(), &obj, client.MergeFrom(before)))
	}
	until(t, "all objects to say "+say, func(context.Context) error {
		for _, obj := range op.objects(t) {
			if obj.Status.Said != say || obj.Status.ObservedGeneration != obj.Generation {
				return fmt.Errorf("%s/%s says %q", obj.Namespace, obj.Name, obj.Status.Said)
			}
		}
		return nil
	})
	for _, obj := range op.objects(t) {
		var pods []string
		for pod, generation := range obj.Status.Generations {
			if generation == obj.Generation {
				pods = append(pods, pod)
			}
		}
		require.Len(t, pods, 1, "generation %d of %s/%s", obj.Generation, obj.Namespace, obj.Name)
		if !slices.Contains(by, pods[0]) {
			by = append(by, pods[0])
		}
	}
	slices.Sort(by)
	return by
}

func (op *running) objects(t *testing.T) (out []tallyv1.Tally) {
	t.Helper()
	var list tallyv1.TallyList
	require.NoError(t, cluster.List(t.Context(), &list, client.MatchingLabels{"operator": op.home}))
	for _, obj := range list.Items {
		if slices.Contains(op.owned, obj.Namespace) {
			out = append(out, obj)
		}
	}
	require.Len(t, out, 3*len(op.owned))
	return out
}

// sharded waits until the root is settled, and requires that its shards do all the work.
func (op *running) sharded(t *testing.T) {
	t.Helper()
	root := op.is(t, metav1.ConditionTrue, "Settled")
	heldByMesh(t, op.lock)
	var leaders []string
	until(t, "a leader of each shard", func(ctx context.Context) error {
		var err error
		if root, err = op.root(ctx); err != nil {
			return err
		}
		leaders = nil
		for _, s := range root.Status.Root.Shards {
			leaders = append(leaders, s.Leader)
		}
		if len(leaders) != 2 || slices.Contains(leaders, "") {
			return fmt.Errorf("leaders %q", leaders)
		}
		return nil
	})
	slices.Sort(leaders)
	require.Subset(t, leaders, op.works(t))
	op.works(t)
}

// unsharded waits until a pod that is in no shard holds the operator's own lock, and
// requires that it does all the work while it holds the lock.
func (op *running) unsharded(t *testing.T) {
	t.Helper()
	for {
		before := op.leads(t)
		op.works(t) // waits until the new leader's first reconciles have ended
		by := op.works(t)
		if after := op.leads(t); holder(after) == holder(before) {
			require.Equal(t, []string{leaderPod(after)}, by)
			return
		}
	}
}

// leads waits until a pod that is in no shard and runs holds the operator's own lock.
func (op *running) leads(t *testing.T) *coordinationv1.Lease {
	t.Helper()
	lease := &coordinationv1.Lease{}
	until(t, "a leader without shards", func(ctx context.Context) error {
		if err := cluster.Get(ctx, op.lock, lease); err != nil {
			return err
		}
		if identity := holder(lease); identity == "" || strings.HasPrefix(identity, meshv1alpha1.LockIdentityPrefix) {
			return fmt.Errorf("%q holds the lock", identity)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: op.home, Name: leaderPod(lease)}}
		if err := cluster.Ready(ctx, pod); err != nil {
			return err
		}
		if lease.Spec.RenewTime.Before(&metav1.MicroTime{Time: pod.CreationTimestamp.Time}) {
			return fmt.Errorf("a pod %s that is gone held the lock last", pod.Name)
		}
		return nil
	})
	return lease
}

// heldByMesh requires that the mesh owns a Lease.
func heldByMesh(t *testing.T, key client.ObjectKey) {
	t.Helper()
	lease := &coordinationv1.Lease{}
	require.NoError(t, cluster.Get(t.Context(), key, lease))
	require.True(t, strings.HasPrefix(holder(lease), meshv1alpha1.LockIdentityPrefix), "%q holds %s", holder(lease), key)
	require.Equal(t, "true", lease.Labels[meshv1alpha1.LockHeldLabel])
}

// A running operator is adopted by a rolling update, and removed from the mesh by another.
// At no time do two pods reconcile the same object.
func TestAdoptedStatefulSet(t *testing.T) {
	t.Parallel()
	op := newRunning(t, "StatefulSet", types.NamespacedName{})
	op.works(t)
	op.adopt(t)
	op.is(t, metav1.ConditionFalse, "TargetNotFound")
	op.label(t, true, 1)
	until(t, "tally-1 on the mesh", func(ctx context.Context) error {
		pod := &corev1.Pod{}
		err := cluster.Get(ctx, client.ObjectKey{Namespace: op.home, Name: "tally-1"}, pod)
		if err == nil && (pod.Labels[meshv1alpha1.EnableProxyLabel] == "" || !kube.PodReady(pod)) {
			err = errors.New("it is not, or not ready")
		}
		return err
	})
	op.is(t, metav1.ConditionFalse, string(meshv1alpha1.ReasonHeldOutside))
	op.works(t)
	require.Equal(t, []string{"tally-0"}, op.works(t), "tally-1 is in standby, and ready")
	op.label(t, true, 0)
	op.rolledOut(t)
	op.sharded(t)
	t.Run("a shard without leader", func(t *testing.T) { op.losesLeader(t) })
	t.Run("disabled and enabled again", func(t *testing.T) {
		op.change(t, func(r *meshv1alpha1.RootConfig) { r.Disable = new(true) })
		op.unsharded(t)
		op.is(t, metav1.ConditionFalse, "Disabled")
		op.change(t, func(r *meshv1alpha1.RootConfig) { r.Disable = nil })
		op.sharded(t)
	})
	t.Run("deleted", func(t *testing.T) { op.removed(t) })
}

func TestAdoptedDeployment(t *testing.T) {
	t.Parallel()
	op := newRunning(t, "Deployment", types.NamespacedName{})
	op.label(t, true, 0)
	op.rolledOut(t)
	op.works(t)
	op.adopt(t)
	op.sharded(t)
	op.removed(t)
}

func TestAdoptedWithUnnamedLock(t *testing.T) {
	t.Parallel()
	lock := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fmt.Sprintf("tally-%d", time.Now().UnixNano())}
	t.Cleanup(func() {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: lock.Namespace, Name: lock.Name}}
		if err := client.IgnoreNotFound(cluster.Delete(context.Background(), lease)); err != nil {
			t.Errorf("deleting lease %s: %v", lock, err)
		}
	})
	op := newRunning(t, "Deployment", lock)
	op.works(t)
	op.adopt(t)
	op.label(t, true, 0)
	op.rolledOut(t)
	op.sharded(t)
	root, err := op.root(t.Context())
	require.NoError(t, err)
	require.Len(t, root.Status.Locks, 1)
	require.True(t, root.Status.Locks[0].Discovered)
	require.Equal(t, lock, types.NamespacedName{Namespace: root.Status.Locks[0].Namespace, Name: root.Status.Locks[0].Name})
	op.excludes(t, lock)
	op.removed(t)
}

// excludes requires that no other installation of the operator acts, which has the same lock in another
// namespace.
func (op *running) excludes(t *testing.T, lock types.NamespacedName) {
	t.Helper()
	second := newRunning(t, op.kind, lock)
	second.adopt(t, meshv1alpha1.LockReference{Namespace: lock.Namespace, Name: lock.Name})
	second.label(t, true, 0)
	until(t, "the other installation to wait", func(ctx context.Context) error {
		c, err := second.root(ctx)
		is := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionReady)
		if err != nil || is == nil || c.Status.Root == nil {
			return fmt.Errorf("no state: %w", err)
		}
		if want := "ShardingConfig " + op.home + "/tally has it, and both would own tallies"; !strings.Contains(is.Message, want) {
			return fmt.Errorf("%s: %s", is.Reason, is.Message)
		}
		for _, s := range c.Status.Root.Shards {
			if s.Leader != "" {
				return fmt.Errorf("shard %s is led by %s", s.Name, s.Leader)
			}
		}
		return nil
	})
	op.sharded(t)
	root, err := second.root(t.Context())
	require.NoError(t, err)
	require.NoError(t, cluster.Delete(t.Context(), root))
	until(t, "the end of the other root", func(ctx context.Context) error {
		c, err := second.root(ctx)
		if err == nil {
			return fmt.Errorf("it is there: %+v", c.Status.Conditions)
		}
		return client.IgnoreNotFound(err)
	})
	require.NoError(t, cluster.Delete(t.Context(), second.object(), client.PropagationPolicy(metav1.DeletePropagationForeground)))
	op.sharded(t)
}

func (op *running) change(t *testing.T, edit func(*meshv1alpha1.RootConfig)) {
	t.Helper()
	c, err := op.root(t.Context())
	require.NoError(t, err)
	before := c.DeepCopy()
	edit(c.Spec.Root)
	require.NoError(t, cluster.Patch(t.Context(), c, client.MergeFrom(before)))
}

// removed deletes the root: one pod leads again, and all are ready.
func (op *running) removed(t *testing.T) {
	t.Helper()
	c, err := op.root(t.Context())
	require.NoError(t, err)
	require.NoError(t, cluster.Delete(t.Context(), c))
	op.unsharded(t)
	until(t, "the root's end", func(ctx context.Context) error {
		c, err := op.root(ctx)
		if err == nil {
			return fmt.Errorf("it is there: %+v", c.Status.Conditions)
		}
		return client.IgnoreNotFound(err)
	})
	op.rolledOut(t)
	op.label(t, false, 0)
	op.rolledOut(t)
	op.unsharded(t)
}

// keepsLock requires that no other client acquires a lock of the mesh without a manager, and that an
// administrator can release it.
func keepsLock(t *testing.T, lock client.ObjectKey) {
	t.Helper()
	lease := &coordinationv1.Lease{}
	require.NoError(t, cluster.Get(t.Context(), lock, lease))
	stolen := lease.DeepCopy()
	stolen.Spec.HolderIdentity = new("outside_1")
	err := cluster.Update(t.Context(), stolen)
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	require.ErrorContains(t, err, "the mesh holds this lock for ShardingConfig "+lock.Namespace+"/")
	require.True(t, apierrors.IsForbidden(cluster.Delete(t.Context(), stolen)))
	forged := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: lock.Namespace, Name: "forged", Labels: map[string]string{meshv1alpha1.LockHeldLabel: "true"}}}
	require.True(t, apierrors.IsForbidden(cluster.Create(t.Context(), forged)))

	released := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata": {"labels": {%q: null}}}`, meshv1alpha1.LockHeldLabel))
	require.NoError(t, cluster.Patch(t.Context(), lease, released), "an administrator may release it")
}

// losesLeader stops the operator's process in a pod that stays ready.
func (op *running) losesLeader(t *testing.T) {
	t.Helper()
	root, err := op.root(t.Context())
	require.NoError(t, err)
	shard := root.Status.Root.Shards[0]
	leader := operatorProcess(t, ready(t, op.home, shard.Leader), "tally")
	require.NoError(t, leader.Signal(unix.SIGSTOP))
	root = op.is(t, metav1.ConditionFalse, "NoLeader") // 30 s after its last lease, which runs 15 s
	missing := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionLeaderMissing)
	require.Equal(t, metav1.ConditionTrue, missing.Status)
	require.Contains(t, missing.Message, "shard "+shard.Name+" has no leader")
	until(t, "an Event of it", func(ctx context.Context) error {
		var all corev1.EventList
		if err := cluster.List(ctx, &all, client.InNamespace(op.home)); err != nil {
			return err
		}
		if !slices.ContainsFunc(all.Items, func(e corev1.Event) bool { return e.Reason == "LeaderMissing" && e.Type == "Warning" }) {
			return errors.New("there is none")
		}
		return nil
	})
	require.NoError(t, leader.Signal(unix.SIGCONT))
	op.sharded(t)
}

// Members of a hand-written shard wait, too, until no pod outside the mesh leads.
func TestHandWrittenShardWaitsForTheLock(t *testing.T) {
	t.Parallel()
	op := newRunning(t, "StatefulSet", types.NamespacedName{})
	op.works(t)
	c := shard(op.home, "all", []string{"member-0"}, op.owned, "tallies.tally.example.com")
	c.Spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: tallyLock}
	create(t, c)
	settled(t, op.home, "all", 0)
	heir := op.workload().(*appsv1.StatefulSet)
	heir.Name, heir.Spec.Replicas = "member", new(int32(1))
	heir.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "member"}}
	heir.Spec.Template.Labels = map[string]string{"app": "member", meshv1alpha1.EnableProxyLabel: "true"}
	create(t, heir)
	ready(t, op.home, "member-0")
	until(t, "the shard to wait", func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
			return err
		}
		is := meta.FindStatusCondition(c.Status.Conditions, meshv1alpha1.ConditionReady)
		if is == nil || is.Reason != string(meshv1alpha1.ReasonHeldOutside) {
			return fmt.Errorf("%+v", is)
		}
		return nil
	})
	require.NotContains(t, op.works(t), "member-0")
	require.NoError(t, cluster.Delete(t.Context(), op.object(), client.PropagationPolicy(metav1.DeletePropagationForeground)))
	settled(t, op.home, "all", 1)
	op.works(t)
	require.Equal(t, []string{"member-0"}, op.works(t))
	heldByMesh(t, op.lock)

	// The lock is released when the last of its configurations is deleted.
	require.NoError(t, cluster.Delete(t.Context(), c))
	until(t, "the release of the lock", func(ctx context.Context) error {
		lease := &coordinationv1.Lease{}
		if err := cluster.Get(ctx, op.lock, lease); err != nil {
			return err
		}
		if strings.HasPrefix(holder(lease), meshv1alpha1.LockIdentityPrefix) {
			return fmt.Errorf("%q holds it", holder(lease))
		}
		return nil
	})
}
