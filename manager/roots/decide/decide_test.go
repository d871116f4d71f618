package decide

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// world is a root whose agents apply each policy at once, but for those of slow pods.
type world struct {
	config *v1alpha1.ShardingConfig
	pods   []*corev1.Pod
	stored Stored
	memory Memory
	now    time.Time
	// applied are the versions of policies in force, by pod uid.
	applied  map[string]string
	policies map[types.UID]compile.Policy
	slow     map[string]bool

	asked    *v1alpha1.ActingSpec // what the spec asks for; nil if that is what shards act by
	unknown  string               // what the spec names that is not served
	lockFree bool                 // the mesh does not hold the operator's lock
	// demanded and followed number the last demand of the lock, and the one that the lock is
	// held by.
	demanded, followed uint64
	lease              time.Duration
	removed            []push.Removed
}

func newWorld(pods int) *world {
	w := &world{config: rootOf(pods), now: time.Unix(1e9, 0), applied: map[string]string{}, slow: map[string]bool{}, demanded: 1, followed: 1}
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
			States:   map[types.NamespacedName]locks.State{lock: {Held: true, Acquired: true, Renewed: w.now, Asked: w.followed}},
			Asked:    w.demanded,
		},
	}
	f.Agents.Removed, f.Locks.Lease, f.Spec.Unknown.Message = slices.Clone(w.removed), w.lease, w.unknown
	if w.lockFree {
		f.Locks.Surveyed[0].HeldByMesh, f.Locks.States = false, nil
	}
	if w.asked != nil && w.asked.DryRun != config.Spec.DryRun {
		f.Spec.Asked = w.asked.DeepCopy()
		f.Spec.Change = &acting.Change{To: w.asked.DeepCopy(), Fields: []string{"spec.dryRun"}}
	}
	for _, p := range w.pods {
		p, uid := p.DeepCopy(), string(p.UID)
		f.Pods.Workload = append(f.Pods.Workload, p)
		f.Pods.ByUID[uid] = p
		policy := w.policies[p.UID]
		f.Agents.Observed[PodKey{"node", uid}] = push.Observation{Connected: true, Reported: true, Capture: v1alpha1.CaptureEBPF, Version: w.applied[uid], Serial: int64(policy.GetSerial())}
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
	w.config.Spec.DryRun = w.stored.Acting.DryRun
	w.push()
	w.now = w.now.Add(time.Second)
	return d
}

// push lets agents apply the policies that follow from what is stored.
func (w *world) push() {
	known := map[origin.Name]compile.Root{origin.Of(w.config): w.memory.Published(w.stored, 0)}
	w.policies = compile.Compile([]*v1alpha1.ShardingConfig{w.config}, w.pods, known, compile.Rules{RequestTimeout: time.Minute}).Policies
	for uid, p := range w.policies {
		if !w.slow[string(uid)] {
			w.applied[string(uid)] = p.Version
		}
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
					require.False(t, all.Overlaps(s.Owned))
					if all = sharding.Union(all, s.Owned); !s.Owned.Empty() {
						owners++
					}
				}
				require.True(t, all.Everything())
				require.Equal(t, shards, owners)
			}
		})
	}
}
