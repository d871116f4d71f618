package explore

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// namespace is that of the root, its pods and its lock.
const namespace = "ns"

// lockName is the operator's lock.
var lockName = types.NamespacedName{Namespace: namespace, Name: "lock"}

// rootOf returns a root with the operator's lock.
func rootOf(withdrawn bool) *v1alpha1.ShardingConfig {
	return &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "s", UID: "root"},
		Spec: v1alpha1.ShardingConfigSpec{
			Controller: &v1alpha1.ControllerConfig{LeaderElectionName: lockName.Name},
			Root: &v1alpha1.RootConfig{
				Prefix: "s", TargetStatefulSet: "p", Disable: &withdrawn,
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
			},
		},
	}
}

// granted and withdrawn are the specs between which Options.Wants change.
var granted, withdrawn = decide.Spec{Config: rootOf(false)}, func() decide.Spec {
	config := rootOf(true)
	return decide.Spec{Config: config, Asked: acting.Of(&config.Spec)}
}()

// podObjects are the pods as the API has them: ready, and admitted.
var podObjects = func() (out [slots]*corev1.Pod) {
	for i := range out {
		out[i] = &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: podName(i), UID: types.UID(podName(i)), Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}},
			Spec:       corev1.PodSpec{NodeName: nodeName},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		}
	}
	return out
}()

// nodeName is the node of all pods: whether an agent is connected does not matter to the model,
// because messages may never arrive.
const nodeName = "node"

// began is when the manager became the leader: so long ago that all agents have connected.
var began = now.Add(-time.Hour)

// facts returns what a manager that has read a State observes of a world. Reports of agents are
// as new as can be.
func (x *explorer) facts(w world, read int32) decide.Facts {
	f := decide.Facts{
		Spec:   granted,
		Stored: decide.Stored{State: x.core.states[read]},
		Pods:   decide.Pods{ByUID: map[string]*corev1.Pod{}},
		Agents: decide.Agents{
			Observed: map[decide.PodKey]push.Observation{}, Policies: map[types.UID]compile.Policy{},
			Since: began, RequestTimeout: time.Minute,
		},
		Locks: x.lockFacts(w.lock),
	}
	f.Stored.Status.Locks = f.Locks.Surveyed
	if x.Wants[w.want] == [shards]uint8{} {
		f.Spec = withdrawn
	}
	info := x.core.get(read)
	for i, p := range w.pods {
		if !p.exists {
			continue
		}
		uid := podName(i)
		if p.object {
			f.Pods.ByUID[uid] = podObjects[i]
			f.Pods.Workload = append(f.Pods.Workload, podObjects[i])
		}
		if sent, ok := x.current(info, i, p); ok {
			f.Agents.Policies[types.UID(uid)] = sent
		} else if p.memory.keys|p.writes != 0 {
			f.Agents.Removed = append(f.Agents.Removed, push.Removed{Node: nodeName, Namespace: namespace, UID: uid})
		}
		f.Agents.Observed[decide.PodKey{Node: nodeName, UID: uid}] = p.observation()
	}
	return f
}

// current returns the policy that a State sends to a pod. It is not ok for a pod without an
// object that is no member.
func (x *explorer) current(info *info, i int, p pod) (compile.Policy, bool) {
	m, out := policy{serial: info.minSerial}, &meshv1.PodPolicy{Sharding: &meshv1.Sharding{Standby: true}}
	switch member := info.members[i] != nobody; {
	case member && (!p.object || x.forgotten(info, i, p)):
		m = policy{serial: info.serial[p.shard], refuse: true}
		out.Refuse = "it was deleted"
	case member:
		m = x.member(info, i, p.shard)
		out.Sharding.Standby = info.empty || info.rolledBack
	case !p.object:
		return compile.Policy{}, false
	}
	out.Version, out.Serial, out.RequiredSerial = m.version(), uint64(m.serial), uint64(m.required)
	return compile.Policy{Node: nodeName, PodPolicy: out}, true
}

// version identifies a policy. A refusal and standby under the same serial have one version,
// because a pod acts on nothing under either.
func (m policy) version() string { return fmt.Sprintf("%d-%d", m.serial, m.keys) }

// observation is what the agent of a pod has to report.
func (p pod) observation() push.Observation {
	if !p.running {
		return push.Observation{}
	}
	o := push.Observation{Connected: true, Reported: true, Capture: v1alpha1.CaptureEBPF, Serial: int64(p.floor.had()), Barred: p.floor.barred}
	if p.settled() {
		o.Version = p.memory.version()
	} else {
		o.Version = "0-" // that of an earlier policy
	}
	return o
}

// settled reports whether an agent has confirmed the policy in force.
func (p pod) settled() bool { return p.disk == p.memory && p.saved == p.floor && p.writes == 0 }

// lockFacts returns what a manager knows of the operator's lock.
func (x *explorer) lockFacts(l lock) decide.Locks {
	mesh := l.holder == mesh || !x.Outside
	acquired := mesh && (l.proven || !x.Outside || x.Flaws.LockByName)
	return decide.Locks{
		Surveyed: []v1alpha1.LockStatus{{Namespace: lockName.Namespace, Name: lockName.Name, HeldByMesh: mesh}},
		States:   map[types.NamespacedName]locks.State{lockName: {Held: mesh, Acquired: acquired, Renewed: now, Asked: 1}},
		Asked:    1, // the keeper works between two decisions here
	}
}

// judgement is what package decide finds of facts.
type judgement struct {
	othersIdle, locksHeld bool
	ready                 uint8 // shards that can take keys, as bits
	// serials are the serials that agents report.
	serials [slots]serialReport
}

// serialReport is the serial that an agent reports of a pod; 0 for none.
type serialReport struct {
	serial int
	barred bool
}

// seen is what facts depend on.
type seen struct {
	read int32
	lock lock
	pods [slots]seenPod
}

type seenPod struct {
	exists, object, running, settled, acts bool
	shard                                  uint8
	memory                                 policy
	floor                                  floor
}

// judge returns what package decide finds of a world by a State. With a flaw it does not see
// some of the pods.
func (x *explorer) judge(w world, read int32) judgement {
	key := seen{read: read, lock: w.lock}
	for i, p := range w.pods {
		key.pods[i] = seenPod{p.exists, p.object, p.running, p.settled(), p.memory.keys|p.writes != 0, p.shard, p.memory, p.floor}
	}
	j, ok := x.core.judged[key]
	if ok {
		return j
	}
	f := x.facts(w, read)
	for shard := range decide.Ready(f, now) {
		j.ready |= 1 << (shard[1] - '0')
	}
	for _, e := range decide.Serials(f, now) {
		switch e := e.(type) {
		case handover.Ahead:
			j.serials[podIndex(e.UID)] = serialReport{serial: int(e.Serial)}
		case handover.Barred:
			j.serials[podIndex(e.UID)] = serialReport{int(e.Serial), true}
		}
	}
	if x.Flaws.RemovedIgnored {
		f.Agents.Removed = nil
	}
	if x.Flaws.StrangersIgnored {
		f.Pods.Workload = nil
	}
	j.othersIdle, j.locksHeld = decide.Evidence(f, now)
	j.locksHeld = j.locksHeld || x.Flaws.LockIgnored
	x.core.judged[key] = j
	return j
}

// reported returns a State after the report of a pod's serial. Two managers do not learn from
// serials that the State does not account for: what they wrote before is known to be written.
func (x *explorer) reported(w world, read int32, i int) (state int32, what string, serial int) {
	r, info := x.judge(w, read).serials[i], x.core.get(read)
	unaccounted := r.serial > info.known(i, w.pods[i].shard)
	switch {
	case r.serial == 0, unaccounted && x.Flaws.Undetected, !x.alone() && (unaccounted || info.members[i] == nobody):
		return read, "", 0
	case r.barred:
		return x.core.barred(read, i, r.serial), "barred: pod, serial", r.serial
	}
	return x.core.ahead(read, i, r.serial), "ahead: pod, serial", r.serial
}

// releasesLock reports whether Decide demands that the mesh releases the operator's lock. It is
// asked only while the shards are withdrawn, because the scopes of Options follow from no spec.
func (x *explorer) releasesLock(w world) bool {
	if x.Wants[w.want] != [shards]uint8{} {
		return false
	}
	_, d := decide.Decide(decide.Memory{}, x.facts(w, w.stored), now)
	return d.Demand.Mode == locks.Release
}
