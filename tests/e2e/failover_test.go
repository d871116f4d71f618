package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	tallyv1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// knowing is the age at which an agent has seen all requests in flight, also if no agent has handed over
// to it.
const knowing = 70 * time.Second

// The next leader of a shard need not wait until the lock of a dead leader expires. With the
// defaults of client-go, candidates read the lock every 2 s to 4.4 s, and it expires after 15 s.
func TestFailoverBeforeLeaseExpiry(t *testing.T) {
	t.Parallel()
	ns, owned := namespace(t, "failover"), namespace(t, "owned")
	probeRights(t, ns)
	shardTally(t, ns)
	create(t, &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: owned, Name: "t", Labels: map[string]string{"operator": ns}}})
	shard, members := membersOf(t, ns, working(t, owned, "hello")[0])

	awaitKnowing(t)
	for i := range 3 {
		lock, _ := lockOnce(t, ns, shard, func(l *coordinationv1.Lease) bool { return holder(l) != "" })
		before, process := holder(lock), operatorProcess(t, ready(t, ns, leaderPod(lock)), "tally")
		last, _ := lockOnce(t, ns, shard, func(*coordinationv1.Lease) bool { return true })
		lock, _ = lockOnce(t, ns, shard, func(l *coordinationv1.Lease) bool { return !l.Spec.RenewTime.Equal(last.Spec.RenewTime) }) // it was just renewed
		require.Equal(t, before, holder(lock))
		runsOut := lock.Spec.RenewTime.Add(time.Duration(*lock.Spec.LeaseDurationSeconds) * time.Second)
		killed := killBetweenRenewals(t, process)
		lock, stalled := lockOnce(t, ns, shard, func(l *coordinationv1.Lease) bool { return holder(l) != "" && holder(l) != before })
		t.Logf("%s follows %s after %v; the machine stalled for %v", holder(lock), before, time.Since(killed).Round(time.Millisecond), stalled)
		require.True(t, lock.Spec.AcquireTime.Time.Before(runsOut.Add(stalled)), "it is acquired before it expires: %+v", lock.Spec)
		require.Subset(t, members, working(t, owned, fmt.Sprintf("after %d", i)))
	}
}

// awaitKnowing waits until the agents have seen all requests in flight.
func awaitKnowing(t *testing.T) {
	t.Helper()
	until(t, "agents that have seen all requests in flight", func(context.Context) error {
		all := agents(t)
		for _, node := range nodes(t) {
			agent := all[node]
			if agent == nil {
				return fmt.Errorf("the one on %s is not ready", node)
			}
			// It serves pods from before it is ready.
			i := slices.IndexFunc(agent.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady })
			if time.Since(agent.Status.Conditions[i].LastTransitionTime.Time) < knowing {
				return fmt.Errorf("the one on %s is too young", node)
			}
		}
		return nil
	})
}

// Clients before client-go 0.24 elect by ConfigMaps and Endpoints, alone or with a Lease.
func TestFailoverOfOldLocks(t *testing.T) {
	t.Parallel()
	awaitKnowing(t)
	for _, kind := range []string{"configmaps", "endpoints", "configmapsleases", "endpointsleases"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			testFailoverOfOldLock(t, kind)
		})
	}
}

func testFailoverOfOldLock(t *testing.T, kind string) {
	ns := namespace(t, "failover")
	probeRights(t, ns)
	config := shard(ns, "s", []string{"a", "b"}, []string{ns}, "services")
	config.Spec.Controller = &meshv1alpha1.ControllerConfig{LeaderElectionName: "candidate"}
	create(t, config, candidate(ns, "a", kind), candidate(ns, "b", kind))
	settled(t, ns, "s", 2)

	key := client.ObjectKey{Namespace: ns, Name: "candidate---s"}
	first, _ := oldLockOnce(t, kind, key, func(r *resourcelock.LeaderElectionRecord) bool {
		return r.HolderIdentity != "" && (!strings.HasSuffix(kind, "leases") || leaseHolder(t, key) == r.HolderIdentity)
	})
	pod, _, _ := strings.Cut(first.HolderIdentity, "_")
	process := operatorProcess(t, ready(t, ns, pod), "candidate")
	last, _ := oldLockOnce(t, kind, key, func(*resourcelock.LeaderElectionRecord) bool { return true })
	before, _ := oldLockOnce(t, kind, key, func(r *resourcelock.LeaderElectionRecord) bool { // it was just renewed
		return !r.RenewTime.Equal(&last.RenewTime)
	})
	require.Equal(t, first.HolderIdentity, before.HolderIdentity)
	killed := killBetweenRenewals(t, process)
	after, stalled := oldLockOnce(t, kind, key, func(r *resourcelock.LeaderElectionRecord) bool {
		return r.HolderIdentity != "" && r.HolderIdentity != before.HolderIdentity
	})
	t.Logf("%s follows %s after %v; the machine stalled for %v", after.HolderIdentity, before.HolderIdentity, time.Since(killed).Round(time.Millisecond), stalled)
	runsOut := before.RenewTime.Add(time.Duration(before.LeaseDurationSeconds) * time.Second)
	require.True(t, after.AcquireTime.Time.Before(runsOut.Add(stalled)), "it is acquired before it expires: %+v, %+v", before, after)
}

// leaseHolder returns the holder of a Lease. Two candidates that create an old lock and a Lease at the same moment can
// get one each, and then wait until both expire.
func leaseHolder(t *testing.T, key client.ObjectKey) string {
	l := &coordinationv1.Lease{}
	if err := cluster.Get(t.Context(), key, l); err != nil {
		return ""
	}
	return holder(l)
}

// candidate returns a pod that takes part in an election by a kind of lock.
func candidate(namespace, name, kind string) *corev1.Pod {
	pod := probe(namespace, name, true)
	pod.Spec.Containers[0].Image = "localhost/ctrlmesh/candidate:dev"
	pod.Spec.Containers[0].Args = []string{"-lock-kind=" + kind}
	pod.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "POD_NAMESPACE", Value: namespace}}
	return pod
}

// oldLockOnce waits until the record in a ConfigMap or Endpoints satisfies ok. It returns the
// record, and how long the machine stalled meanwhile.
func oldLockOnce(t *testing.T, kind string, key client.ObjectKey, ok func(*resourcelock.LeaderElectionRecord) bool) (record resourcelock.LeaderElectionRecord, stalled time.Duration) {
	t.Helper()
	var object client.Object = &corev1.ConfigMap{}
	if strings.HasPrefix(kind, "endpoints") {
		object = &corev1.Endpoints{} //nolint:staticcheck // operators of old elect by them
	}
	stalled = closely(t, "the lock", func(ctx context.Context) error {
		if err := cluster.Get(ctx, key, object); err != nil {
			return err
		}
		record = resourcelock.LeaderElectionRecord{}
		if err := json.Unmarshal([]byte(object.GetAnnotations()[resourcelock.LeaderElectionRecordAnnotationKey]), &record); err != nil {
			return err
		}
		return orElse(ok(&record), fmt.Sprintf("it is not as required: %+v", record))
	})
	return record, stalled
}

// closely polls so often that a measurement does not depend on it, until cond returns nil. It
// returns how long the machine stalled meanwhile: by how much polls took longer than a second.
func closely(t *testing.T, what string, cond func(context.Context) error) (stalled time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := errors.New("it was not polled")
	last := time.Now()
	kube.Every(ctx, 20*time.Millisecond, func(ctx context.Context, _ int) {
		if ctx.Err() != nil {
			return
		}
		if err = cond(ctx); err == nil {
			cancel()
		}
		now := time.Now()
		stalled += max(0, now.Sub(last)-time.Second)
		last = now
	})
	require.NoError(t, err, "waiting for %s", what)
	return stalled
}

// shardTally runs the operator in two shards of two members, for objects with its own label, and waits
// until they are settled.
func shardTally(t *testing.T, ns string) {
	t.Helper()
	root := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "tally"},
		Spec: meshv1alpha1.ShardingConfigSpec{
			Controller: &meshv1alpha1.ControllerConfig{LeaderElectionName: tallyLock},
			Root: &meshv1alpha1.RootConfig{
				Prefix:    "tally",
				TargetRef: &meshv1alpha1.TargetRef{Kind: "StatefulSet", Name: "tally"},
				Auto:      &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 2, Rebalance: meshv1alpha1.RebalanceOff},
				ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{
					{APIGroups: []string{tallyv1.GroupVersion.Group}, Resources: []string{"tallies"}},
				}}},
			},
		},
	}
	create(t, root)
	until(t, "the manager to see the root", func(ctx context.Context) error { // pods created before would be in no shard
		err := cluster.Get(ctx, client.ObjectKeyFromObject(root), root)
		if err == nil && root.Status.ObservedGeneration < root.Generation {
			err = errors.New("it has not")
		}
		return err
	})
	set := (&tally{namespace: ns}).workload("tally")
	set.Spec.Replicas = new(int32(4))
	set.Spec.Template.Spec.Containers = set.Spec.Template.Spec.Containers[1:] // the operator alone
	operator := &set.Spec.Template.Spec.Containers[0]
	operator.Args = append(operator.Args, "-selector=operator="+ns)
	create(t, set)
	until(t, "the shards", func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKeyFromObject(root), root); err != nil {
			return err
		}
		s := root.Status.Root
		if s == nil || s.Handover != "Settled" || len(s.Shards) != 2 || s.Shards[0].ReadyMembers != 2 || s.Shards[1].ReadyMembers != 2 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// working changes the object, waits until it is reconciled, and returns the pods that have
// reconciled it so far.
func working(t *testing.T, owned, say string) (by []string) {
	t.Helper()
	obj := &tallyv1.Tally{ObjectMeta: metav1.ObjectMeta{Namespace: owned, Name: "t"}}
	require.NoError(t, cluster.Patch(t.Context(), obj, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"say":%q}}`, say))))
	until(t, "the object to say "+say, func(ctx context.Context) error {
		err := cluster.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if err == nil && (obj.Status.Said != say || obj.Status.ObservedGeneration != obj.Generation) {
			err = fmt.Errorf("it says %q", obj.Status.Said)
		}
		return err
	})
	return obj.Status.ReconciledBy
}

// membersOf returns the shard of a pod, and all members of that shard.
func membersOf(t *testing.T, ns, pod string) (shard string, members []string) {
	t.Helper()
	until(t, "the shard of "+pod, func(ctx context.Context) error {
		var configs meshv1alpha1.ShardingConfigList
		if err := cluster.List(ctx, &configs, client.InNamespace(ns)); err != nil {
			return err
		}
		for _, c := range configs.Items {
			members = nil
			for _, m := range c.Status.Pods {
				members = append(members, m.Name)
			}
			if shard = c.Name; c.Spec.Root == nil && len(members) == 2 && slices.Contains(members, pod) {
				return nil
			}
		}
		return errors.New("it is of none with two members")
	})
	return shard, members
}

// lockOnce waits until a shard's lock satisfies ok. It returns the lock, and how long the
// machine stalled meanwhile.
func lockOnce(t *testing.T, ns, shard string, ok func(*coordinationv1.Lease) bool) (lock *coordinationv1.Lease, stalled time.Duration) {
	t.Helper()
	lock = &coordinationv1.Lease{}
	stalled = closely(t, "the lock of "+shard, func(ctx context.Context) error {
		if err := cluster.Get(ctx, client.ObjectKey{Namespace: ns, Name: tallyLock + "---" + shard}, lock); err != nil {
			return err
		}
		return orElse(ok(lock), fmt.Sprintf("it is not as required: %+v", lock.Spec))
	})
	return lock, stalled
}

// killBetweenRenewals kills the operator's process, as the kernel does when it is out of memory, if the lock
// has just been renewed. While a renewal is in flight, the lock would expire as usual: the process waits
// for the response, or renews the second object of the lock. The next renewal is due after two seconds.
func killBetweenRenewals(t *testing.T, process *os.Process) (at time.Time) {
	t.Helper()
	time.Sleep(700 * time.Millisecond)
	require.NoError(t, process.Kill())
	return time.Now()
}

// operatorProcess returns the operator's process in a pod. A command that finds and kills it takes too
// long on a busy machine.
func operatorProcess(t *testing.T, pod *corev1.Pod, program string) *os.Process {
	t.Helper()
	pid, err := stats.ProcessOf(string(pod.UID), stats.Runs(program)) // the nodes' processes are visible on the machine
	require.NoError(t, err)
	process, err := os.FindProcess(pid)
	require.NoError(t, err)
	return process
}
