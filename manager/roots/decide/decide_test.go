package decide

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// world is a root whose agents apply each policy at once.
type world struct {
	config *v1alpha1.ShardingConfig
	pods   []*corev1.Pod
	stored Stored
	memory Memory
	now    time.Time
	// applied are the versions of policies in force, by pod uid.
	applied  map[string]string
	policies map[types.UID]compile.Policy
}

func newWorld(pods int) *world {
	w := &world{config: rootOf(pods), now: time.Unix(1e9, 0), applied: map[string]string{}}
	for i := range pods {
		name, controller := fmt.Sprintf("op-%d", i), true
		w.pods = append(w.pods, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: name, UID: types.UID(name),
				Labels:          map[string]string{v1alpha1.EnableProxyLabel: "true"},
				Annotations:     map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", Controller: &controller}},
			},
			Spec:   corev1.PodSpec{NodeName: "node"},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		})
	}
	w.stored.State, _ = Load(nil)
	return w
}

// rootOf returns a root of some shards with one replica each.
func rootOf(shards int) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "root", Generation: 1},
		Spec: v1alpha1.ShardingConfigSpec{
			Controller: &v1alpha1.ControllerConfig{LeaderElectionName: "lock"},
			Root: &v1alpha1.RootConfig{
				Prefix: "op", TargetStatefulSet: "op",
				Auto:             &v1alpha1.AutoConfig{ShardingSize: int32(shards), EveryShardReplicas: 1},
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
			},
		},
	}
}

// facts returns what a round observes. Calls share nothing that may be written to.
func (w *world) facts() Facts {
	config, lock := w.config.DeepCopy(), types.NamespacedName{Namespace: "ns", Name: "lock"}
	stored := w.stored
	stored.Status = *stored.Status.DeepCopy()
	f := Facts{
		Spec: Spec{Config: config, Asked: acting.Of(&config.Spec)}, Stored: stored,
		Pods:    Pods{ByUID: map[string]*corev1.Pod{}, NodesGone: map[string]bool{}},
		Agents:  Agents{Observed: map[PodKey]push.Observation{}, Policies: w.policies, Since: time.Unix(1e9, 0).Add(-time.Hour), RequestTimeout: time.Minute},
		Weights: Weights{Counted: true, Current: true},
		Locks: Locks{
			Surveyed: []v1alpha1.LockStatus{{Namespace: "ns", Name: "lock", HeldByMesh: true}},
			States:   map[types.NamespacedName]locks.State{lock: {Held: true, Acquired: true, Renewed: w.now, Asked: 1}},
			Asked:    1,
		},
	}
	for _, p := range w.pods {
		p, uid := p.DeepCopy(), string(p.UID)
		f.Pods.Workload = append(f.Pods.Workload, p)
		f.Pods.ByUID[uid] = p
		policy := w.policies[p.UID]
		f.Agents.Observed[PodKey{"node", uid}] = push.Observation{Connected: true, Known: true, Capture: v1alpha1.CaptureEBPF, Version: w.applied[uid], Serial: int64(policy.GetSerial())}
	}
	return f
}

// round decides twice, asserts that both decisions are the same and that nothing was written to,
// and lets agents apply what follows.
func (w *world) round(t *testing.T) Decision {
	t.Helper()
	f := w.facts()
	next, d := Decide(w.memory, f, w.now)
	require.Equal(t, w.facts(), f)
	again, same := Decide(w.memory, w.facts(), w.now)
	require.Equal(t, next, again)
	require.Equal(t, d, same)

	w.memory = next
	w.stored.Status, w.stored.State, w.stored.Acting = d.Status, d.State, d.Status.Root.Acting
	w.push()
	w.now = w.now.Add(time.Second)
	return d
}

// push lets agents apply the policies that follow from what is stored.
func (w *world) push() {
	known := map[origin.Name]compile.Root{origin.Of(w.config): w.memory.Published(w.stored, 0)}
	w.policies = compile.Compile([]*v1alpha1.ShardingConfig{w.config}, w.pods, known, compile.Rules{RequestTimeout: time.Minute}).Policies
	for uid, p := range w.policies {
		w.applied[string(uid)] = p.Version
	}
}

// Decide is a function of its arguments, and writes to none of them. A leader that remembers
// nothing gets there as well.
func TestDecideIsAFunction(t *testing.T) {
	for name, forgets := range map[string]bool{"a leader that remembers": false, "a leader that remembers nothing": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(3)
			for _, shards := range []int{2, 3, 1} {
				w.config = rootOf(shards)
				w.config.Spec.Root.OnChange = v1alpha1.OnChangeRelist
				w.config.Generation = int64(shards)
				for range 20 {
					if forgets {
						w.memory = Memory{}
					}
					w.round(t)
				}
				var all sharding.Scope
				owners := 0
				for _, s := range w.stored.State.Shards {
					require.False(t, all.Overlaps(s.Held))
					if all = sharding.Union(all, s.Held); !s.Held.Empty() {
						owners++
					}
				}
				require.True(t, all.Everything())
				require.Equal(t, shards, owners)
			}
		})
	}
}

func TestFirstGrantWaitsForTheLock(t *testing.T) {
	w := newWorld(1)
	w.round(t) // pods are sent standby
	f := w.facts()
	f.Locks.Surveyed[0].HeldByMesh = false
	f.Locks.States = nil
	_, d := Decide(w.memory, f, w.now)
	require.False(t, d.State.Holds())
	require.Equal(t, locks.Acquire, d.Demand.Mode)
	_, d = Decide(w.memory, w.facts(), w.now)
	require.True(t, d.State.Holds())
	require.Equal(t, locks.Keep, d.Demand.Mode)
}

// The keeper may be about to release a lock by the demand that it loaded before.
func TestFirstGrantWaitsUntilItsDemandIsFollowed(t *testing.T) {
	for name, c := range map[string]struct {
		asked, followed uint64
		holds           bool
	}{
		"released before":   {0, 0, false},
		"an earlier demand": {2, 1, false},
		"followed":          {2, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(1)
			w.round(t)
			f := w.facts()
			f.Locks.Asked = c.asked
			for lock, s := range f.Locks.States {
				s.Asked = c.followed
				f.Locks.States[lock] = s
			}
			_, d := Decide(w.memory, f, w.now)
			require.Equal(t, c.holds, d.State.Holds())
			require.NotEqual(t, locks.Release, d.Demand.Mode)
		})
	}
}

// After a restore, a pod that was deleted may be in a shard that the state does not know.
func TestStatusNamesRemovedPodsThatMayAct(t *testing.T) {
	w := newWorld(1)
	w.round(t)
	w.round(t)
	require.True(t, w.stored.State.Holds())
	w.stored.State, _ = Load(w.stored.Status.Root) // another leader, without evidence
	f := w.facts()
	f.Agents.Removed = []push.Removed{{Node: "node-1", Namespace: "ns", UID: "uid-1"}}
	_, d := Decide(Memory{}, f, w.now)
	require.False(t, d.State.Evidence.OthersConfirmed)
	ready := apimeta.FindStatusCondition(d.Status.Conditions, v1alpha1.ConditionReady)
	require.Contains(t, ready.Message, "waiting for the pod with uid uid-1 on node node-1, which was deleted or has exited, and may run on")
}

// Former leaders may go on whatever the next spec names.
func TestEverySpecChangeWaitsForLeases(t *testing.T) {
	for _, unknown := range []string{"", "no resource is called talies"} {
		w := newWorld(1)
		w.round(t)
		w.round(t)
		require.True(t, w.stored.State.Holds())
		w.stored.State = handover.State{Shards: map[string]handover.Shard{}, Members: w.stored.State.Members, MinSerial: w.stored.State.MinSerial}
		for _, m := range w.stored.State.Members {
			w.stored.State.Shards[m.Shard] = handover.Shard{Serial: m.Serial}
		}
		w.push() // the member is in standby
		f := w.facts()
		next := acting.Of(&f.Spec.Config.Spec)
		next.DryRun = true
		f.Spec.Change, f.Spec.Unknown.Message = &acting.Change{To: next, Fields: []string{"spec.dryRun"}}, unknown
		require.Equal(t, []types.NamespacedName{{Namespace: "ns", Name: "lock---op-1-normal"}}, Lingering(f, w.now))
		f.Locks.Lease = time.Minute
		m, d := Decide(w.memory, f, w.now)
		require.False(t, d.Status.Root.Acting.DryRun, unknown)
		_, d = Decide(m, f, w.now.Add(time.Minute-1))
		require.False(t, d.Status.Root.Acting.DryRun, unknown)
		_, d = Decide(m, f, w.now.Add(time.Minute))
		require.True(t, d.Status.Root.Acting.DryRun, unknown)
	}
}
