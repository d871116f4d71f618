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
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

// tallyLock is the name of the lock of tests/operators/tally.
const tallyLock = "tally-leader"

// tally is the operator of that name, in two shards of two replicas each.
type tally struct {
	namespace string
	shards    []*tallyShard
}

// tallyShard is a StatefulSet of the operator's, and a namespace that it owns.
type tallyShard struct{ name, owns string }

func newTally(t *testing.T) *tally {
	t.Helper()
	op := &tally{namespace: namespace(t, "tally")}
	probeRights(t, op.namespace)
	for _, name := range []string{"a", "b"} {
		s := &tallyShard{name, namespace(t, "owned")}
		op.shards = append(op.shards, s)
		c := shard(op.namespace, name, []string{name + "-0", name + "-1"}, []string{s.owns}, "tallies.tally.example.com")
		c.Spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: tallyLock}
		create(t, c)
		settled(t, op.namespace, name, 0) // objects created from now on are stamped
		for i := range 5 {
			create(t, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: s.owns, Name: fmt.Sprintf("t-%d", i)}})
		}
		create(t, op.workload(name))
	}
	for _, s := range op.shards {
		settled(t, op.namespace, s.name, 2)
	}
	return op
}

// workload returns a StatefulSet of the operator, with a second container in which tests run
// clients.
func (op *tally) workload(name string) *appsv1.StatefulSet {
	pod := probe(op.namespace, name, true)
	pod.Labels = map[string]string{"app": name, meshv1alpha1.EnableProxyLabel: "true"}
	pod.Spec.Containers = append(netPod("", "", "").Spec.Containers, corev1.Container{
		Name: "tally", Image: "localhost/ctrlmesh/tally:dev", ImagePullPolicy: corev1.PullIfNotPresent,
		Args: []string{"-lock=" + tallyLock},
		Env: []corev1.EnvVar{{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}},
	})
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: op.namespace, Name: name},
		Spec: appsv1.StatefulSetSpec{
			Replicas: new(int32(2)), PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}
}

// leads waits until a shard's lock has a holder other than old, and returns the lock.
func (op *tally) leads(t *testing.T, s *tallyShard, old string) *coordinationv1.Lease {
	t.Helper()
	lease := &coordinationv1.Lease{}
	until(t, "a leader of "+s.name, func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKey{Namespace: op.namespace, Name: tallyLock + "---" + s.name}, lease)
		if holder := holder(lease); err == nil && (holder == "" || holder == old) {
			err = fmt.Errorf("%q holds the lock", holder)
		}
		return err
	})
	return lease
}

func holder(lease *coordinationv1.Lease) string {
	if lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// leaderPod returns the pod that leads: client-go appends a random suffix to its name.
func leaderPod(lease *coordinationv1.Lease) string {
	name, _, _ := strings.Cut(holder(lease), "_")
	return name
}

// works changes all objects, and waits until each is reconciled, only by members of the
// shard that owns it.
func (op *tally) works(t *testing.T, say string) {
	t.Helper()
	for _, s := range op.shards {
		for _, obj := range s.tallies(t) {
			before := obj.DeepCopy()
			obj.Spec.Say = say
			require.NoError(t, cluster.Patch(t.Context(), &obj, client.MergeFrom(before)))
		}
	}
	for _, s := range op.shards {
		until(t, "the objects of "+s.name+" to say "+say, func(context.Context) error {
			for _, obj := range s.tallies(t) {
				if obj.Status.Said != say || obj.Status.ObservedGeneration != obj.Generation {
					return fmt.Errorf("%s says %q", obj.Name, obj.Status.Said)
				}
			}
			return nil
		})
		for _, obj := range s.tallies(t) {
			require.NotEmpty(t, obj.Status.ReconciledBy)
			require.Subset(t, []string{s.name + "-0", s.name + "-1"}, obj.Status.ReconciledBy)
		}
	}
}

func (s *tallyShard) tallies(t *testing.T) []tallyv1.Tally {
	t.Helper()
	var list tallyv1.TallyList
	require.NoError(t, cluster.List(t.Context(), &list, client.InNamespace(s.owns)))
	require.Len(t, list.Items, 5)
	return list.Items
}

// operatorTest has the subtests of TestEachShardElectsItsLeader, which depend on one another in this order.
type operatorTest struct {
	op   *tally
	a, b *tallyShard
}

// Each shard of an unmodified operator elects a leader of its own.
func TestEachShardElectsItsLeader(t *testing.T) {
	op := newTally(t)
	o := &operatorTest{op: op, a: op.shards[0], b: op.shards[1]}
	t.Run("a lock each", o.ownLocks)
	t.Run("a leader killed", o.leaderKilled)
	t.Run("no manager", o.noManager)
}

func (o *operatorTest) ownLocks(t *testing.T) {
	o.op.works(t, "hello")
	heldByMesh(t, client.ObjectKey{Namespace: o.op.namespace, Name: tallyLock})
	for _, s := range o.op.shards {
		pod := ready(t, o.op.namespace, leaderPod(o.op.leads(t, s, "")))
		inside := clientOf(t, from(t, pod), inJSON)
		until(t, "a member of "+s.name+" to see the leader", func(ctx context.Context) error { // which may change meanwhile
			seen := &coordinationv1.Lease{}
			if err := inside.Get(ctx, client.ObjectKey{Namespace: o.op.namespace, Name: tallyLock}, seen); err != nil {
				return err
			}
			lease := o.op.leads(t, s, "")
			require.Equal(t, tallyLock, seen.Name)
			require.Equal(t, lease.UID, seen.UID)
			return orElse(holder(lease) == holder(seen), fmt.Sprintf("it sees %q, not %q", holder(seen), holder(lease)))
		})
		until(t, "the status to name the leader", func(context.Context) error {
			lease, c := o.op.leads(t, s, ""), settled(t, o.op.namespace, s.name, 2)
			require.Equal(t, lease.Name, c.Status.Lock)
			for _, m := range c.Status.Pods {
				if m.LockHolder != (m.Name == leaderPod(lease)) {
					return fmt.Errorf("%+v", m)
				}
			}
			return nil
		})
		until(t, "the metrics to have one holder", func(context.Context) error {
			holders := 0.0
			for _, node := range nodes(t) {
				holders += kube.Total(scrapeAgent(t, node)["ctrlmesh_lock_holder"], map[string]string{"namespace": o.op.namespace, "shard": s.name})
			}
			return orElse(holders == 1, fmt.Sprint(holders)) // agents set it when they report
		})
	}
}

func (o *operatorTest) leaderKilled(t *testing.T) {
	leaseA, leaseB := o.op.leads(t, o.a, ""), o.op.leads(t, o.b, "")
	require.NoError(t, cluster.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: o.op.namespace, Name: leaderPod(leaseA)}},
		client.GracePeriodSeconds(0)))
	moved := o.op.leads(t, o.a, holder(leaseA))
	require.Greater(t, *moved.Spec.LeaseTransitions, *leaseA.Spec.LeaseTransitions)
	o.op.works(t, "after the leader")
	stayed := o.op.leads(t, o.b, "")
	require.Equal(t, holder(leaseB), holder(stayed))
	require.Equal(t, *leaseB.Spec.LeaseTransitions, *stayed.Spec.LeaseTransitions)
}

func (o *operatorTest) noManager(t *testing.T) {
	restore := withoutManager(t)
	o.op.works(t, "without a manager")
	err := cluster.Create(t.Context(), netPod(o.op.namespace, "new", nodes(t)[0]))
	require.ErrorContains(t, err, "webhook", "its shard is unknown without a manager")
	outsider(t, o.op.namespace, "not-on-the-mesh")
	says(t, 1, []string{"status"}, "manager: 0/", o.op.namespace)
	says(t, 0, []string{"shards", o.op.shards[0].name, "-n", o.op.namespace}, "2/2")

	// The agents of both leaders restart without a manager.
	var led []string
	for _, s := range o.op.shards {
		led = append(led, ready(t, o.op.namespace, leaderPod(o.op.leads(t, s, ""))).Spec.NodeName)
	}
	slices.Sort(led)
	before := map[string]*corev1.Pod{}
	for _, node := range slices.Compact(led) {
		before[node] = agentOn(t, node)
		require.NoError(t, cluster.Delete(t.Context(), before[node]))
	}
	until(t, "the agents to be replaced", func(ctx context.Context) error {
		for node, pod := range agents(t) {
			if old := before[node]; old != nil && pod.UID == old.UID {
				return fmt.Errorf("the old one is still on %s", node)
			}
		}
		return agentsCurrent(ctx)
	})
	o.op.works(t, "without a manager, with another agent")
	require.NoError(t, noPods(t.Context(), kube.ManagerName, ""))
	lock := client.ObjectKey{Namespace: o.op.namespace, Name: tallyLock}
	keepsLock(t, lock)

	restore()
	start := time.Now()
	for _, s := range o.op.shards {
		owns(t, o.op.namespace, s.name, s.owns, "new-of-"+s.name) // settles only when the new policy has arrived
		settled(t, o.op.namespace, s.name, 2)
	}
	t.Logf("agents received changes %v after the manager's return", time.Since(start).Round(time.Millisecond))
	o.op.works(t, "with a manager again")
	until(t, "the mesh to acquire the operator lock again", func(ctx context.Context) error {
		lease := &coordinationv1.Lease{}
		err := cluster.Get(ctx, lock, lease)
		if err == nil && lease.Labels[meshv1alpha1.LockHeldLabel] != "true" {
			err = errors.New("it does not")
		}
		return err
	})
}
