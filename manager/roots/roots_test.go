package roots

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/status"
	"github.com/ctrlmesh/ctrlmesh/manager/weigh"
)

// mesh is a cluster with its agents, and one manager after another.
type mesh struct {
	*testing.T
	client.Client
	*Roots
	keeper   *locks.Keeper
	recorder *events.FakeRecorder
	now      time.Time
	compiled compile.Result
	policies map[types.UID]compile.Policy   // of compiled
	seen     map[string]push.Observation    // by pod uid
	observed map[string][]push.ObservedLock // likewise
	away     map[string]bool                // nodes without agent
	left     map[string]time.Time           // when the leader heard of a node last
	nodes    map[string]bool                // that are gone
	deaf     map[string]bool                // pods of which agents do not answer
	floors   map[string]int64               // the least serials that agents accept, by pod uid
	inForce  map[string]compile.Policy      // by pod uid
	// oldAgents say nothing of serials but what versions say.
	oldAgents bool
	funcs     interceptor.Funcs
	pods      int // made
	// leaders are the pods, by uid, that hold locks, each with its name upstream.
	leaders map[[2]string]string
	// idle pods contend for no lock.
	idle        map[string]bool
	removed     []push.Removed
	unconnected []string // nodes
}

const requestTimeout = 90 * time.Second

var namespaces = []string{"blue", "green", "red", "white"}

func newMesh(t *testing.T) *mesh {
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	m := &mesh{
		T: t, recorder: events.NewFakeRecorder(1000), now: time.Unix(1e9, 0),
		seen: map[string]push.Observation{}, observed: map[string][]push.ObservedLock{}, idle: map[string]bool{}, away: map[string]bool{}, nodes: map[string]bool{}, deaf: map[string]bool{}, floors: map[string]int64{}, inForce: map[string]compile.Policy{},
	}
	// Nothing is applied, so the fields' managers need not be tracked, which costs most of the time.
	tracker := clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())
	m.Client = fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(tracker).WithStatusSubresource(&v1alpha1.ShardingConfig{}).WithInterceptorFuncs(interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if f := m.funcs.SubResourceUpdate; f != nil {
				return f(ctx, c, sub, o, opts...)
			}
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
		SubResourceCreate: func(ctx context.Context, c client.Client, sub string, o, s client.Object, opts ...client.SubResourceCreateOption) error {
			if f := m.funcs.SubResourceCreate; f != nil {
				return f(ctx, c, sub, o, s, opts...)
			}
			return c.SubResource(sub).Create(ctx, o, s, opts...)
		},
	}).Build()
	m.lead()
	return m
}

// lead makes another manager the leader.
func (m *mesh) lead() {
	m.keeper = &locks.Keeper{Client: m.Client, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return m.now }}
	m.Roots = &Roots{
		Locks: m.keeper.State, Client: m.Client, Recorder: m.recorder, Weigher: &weigh.Weigher{FirstWithin: time.Nanosecond}, Log: slog.New(slog.DiscardHandler),
		Now: func() time.Time { return m.now },
		Observe: func(node, uid string) push.Observation {
			if !m.away[node] {
				m.left[node] = m.now
			} else if m.left[node].IsZero() {
				return push.Observation{}
			}
			o := m.seen[uid]
			o.Connected, o.Left = !m.away[node], m.left[node]
			o.ObservedLocks = m.observed[uid]
			for lock, leader := range m.leaders {
				if leader == uid {
					o.HeldLocks = append(o.HeldLocks, lock[0])
				}
			}
			return o
		},
	}
	m.compiled, m.policies = compile.Result{}, nil
	m.left = map[string]time.Time{}
}

func (m *mesh) root(shards, replicas int32) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "root", Generation: 1},
		Spec: v1alpha1.ShardingConfigSpec{
			Controller: &v1alpha1.ControllerConfig{LeaderElectionName: "lock"},
			Root: &v1alpha1.RootConfig{
				Prefix: "op", TargetStatefulSet: "op",
				Auto:             &v1alpha1.AutoConfig{ShardingSize: shards, EveryShardReplicas: replicas},
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
			},
		},
	}
	require.NoError(m, m.Create(m.Context(), c))
	return c
}

// get is the root as it is written.
func (m *mesh) get() *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{}
	require.NoError(m, m.Get(m.Context(), types.NamespacedName{Namespace: "ns", Name: "op"}, c))
	return c
}

func (m *mesh) change(f func(*v1alpha1.ShardingConfig)) {
	c := m.get()
	f(c)
	c.Generation++
	require.NoError(m, m.Update(m.Context(), c))
}

// pod makes a pod of the workload, on a node of its own.
func (m *mesh) pod(ordinal int) *corev1.Pod {
	m.pods++
	yes := true
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: fmt.Sprintf("op-%d", ordinal), UID: types.UID(fmt.Sprintf("uid-%d-%d", ordinal, m.pods)),
			Labels:          map[string]string{v1alpha1.EnableProxyLabel: "true"},
			Annotations:     map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", Controller: &yes}},
		},
		Spec: corev1.PodSpec{NodeName: fmt.Sprintf("node-%d", ordinal)},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		}},
	}
	require.NoError(m, m.Create(m.Context(), p))
	return p
}

func (m *mesh) world() World {
	w := World{Compiled: m.compiled, Removed: m.removed, Unconnected: m.unconnected, Namespaces: namespaces, RequestTimeout: requestTimeout, Node: func(name string) bool { return !m.nodes[name] }}
	var configs v1alpha1.ShardingConfigList
	var pods corev1.PodList
	require.NoError(m, m.List(m.Context(), &configs))
	require.NoError(m, m.List(m.Context(), &pods))
	for i := range configs.Items {
		w.Configs = append(w.Configs, &configs.Items[i])
	}
	for i := range pods.Items {
		if compile.Labelled(&pods.Items[i]) { // no others are watched
			w.Pods = append(w.Pods, &pods.Items[i])
		}
	}
	return w
}

// push compiles what is known, and lets agents hear and answer.
func (m *mesh) push() {
	w := m.world()
	known, ok := m.Known(w.Configs, w.Namespaces)
	if !ok {
		return
	}
	m.compiled = compile.Compile(w.Configs, w.Pods, known, compile.Rules{RequestTimeout: requestTimeout})
	m.policies = m.compiled.Policies
	for uid, p := range m.policies {
		if !m.away[p.Node] && !m.deaf[string(uid)] {
			m.apply(string(uid), p)
		}
	}
	m.elect()
	m.disjoint()
}

// apply is what an agent does with a policy: one with a lesser serial than the pod has had
// is rejected, or one that requires a greater one.
func (m *mesh) apply(uid string, p compile.Policy) {
	serial := int64(p.Serial)
	forgotten := p.RequiredSerial > 0 && (m.floors[uid] > m.seen[uid].Serial || int64(p.RequiredSerial) > m.seen[uid].Serial)
	if p.Refuse == "" && (serial < m.floors[uid] || forgotten) {
		o := m.seen[uid]
		o.Nacked = p.Version
		m.seen[uid] = o
		return
	}
	m.inForce[uid] = p
	serial = max(serial, m.seen[uid].Serial)
	barred := p.Refuse != "" && serial > 0
	m.seen[uid] = push.Observation{Known: true, Capture: v1alpha1.CaptureEBPF, Version: p.Version, Serial: serial, Barred: barred && !m.oldAgents}
	if barred {
		serial++
	}
	m.floors[uid] = max(m.floors[uid], serial)
}

// elect lets members lead under the locks of their policies.
func (m *mesh) elect() {
	before := m.leaders
	m.leaders = map[[2]string]string{}
	for uid, p := range m.policies {
		for _, l := range p.GetSharding().GetLocks() {
			lock := [2]string{l.Namespace + "/" + l.Name, l.UpstreamName}
			if id := string(uid); !p.GetSharding().GetStandby() && !m.idle[id] && m.seen[id].Version == p.Version &&
				(before[lock] == id || m.leaders[lock] == "") {
				m.leaders[lock] = id
			}
		}
	}
}

// disjoint asserts that no two shards are written to own a key, and that no pods of
// different shards act on one.
func (m *mesh) disjoint() {
	m.Helper()
	w := m.world()
	for _, c := range w.Configs {
		_, err := Load(c.Status.Root) // says so
		require.NoError(m, err)
	}
	ended := map[types.UID]bool{}
	for _, p := range w.Pods {
		ended[p.UID] = compile.Ended(p)
	}
	acting := map[string]sharding.Scope{}
	for uid, p := range m.inForce {
		_, known := m.policies[types.UID(uid)]
		if m.nodes[p.Node] || ended[types.UID(uid)] || !known && !m.away[p.Node] {
			delete(m.inForce, uid)
			continue
		}
		if p.Refuse != "" || p.GetSharding().GetStandby() || p.GetSharding().GetDryRun() {
			continue
		}
		for _, l := range p.GetSharding().GetLimits() {
			s, err := sharding.FromProto(l.GetScope())
			require.NoError(m, err)
			acting[p.Sharding.Shard] = sharding.Union(acting[p.Sharding.Shard], s)
		}
	}
	var all sharding.Scope
	for shard, s := range acting {
		require.False(m, all.Overlaps(s), "%s acts on what another shard does: %s", shard, all.Intersect(s))
		all = sharding.Union(all, s)
	}
}

func (m *mesh) round() error {
	err := m.Round(m.Context(), m.world())
	m.keepLocks()
	return err
}

// keepLocks does what roots ask of the keeper of locks.
func (m *mesh) keepLocks() {
	if demands, ok := m.Demands(); ok {
		_, err := m.keeper.Round(m.Context(), demands, func(types.NamespacedName) bool { return false })
		require.NoError(m, err)
	}
}

// settle goes on until nothing changes any more.
func (m *mesh) settle() {
	m.Helper()
	before := ""
	for range 100 {
		require.NoError(m, m.round())
		m.push()
		m.now = m.now.Add(time.Second)
		c := &v1alpha1.ShardingConfig{}
		err := m.Get(m.Context(), types.NamespacedName{Namespace: "ns", Name: "op"}, c)
		if apierrors.IsNotFound(err) {
			return
		}
		require.NoError(m, err)
		if c.ResourceVersion == before {
			return
		}
		before = c.ResourceVersion
	}
	m.Fatal("it does not settle")
}

// held is what shards hold, which must be everything.
func (m *mesh) held() map[string]sharding.Scope {
	m.Helper()
	state, err := Load(m.get().Status.Root)
	require.NoError(m, err)
	out := map[string]sharding.Scope{}
	var all sharding.Scope
	for name, s := range state.Shards {
		out[name] = s.Held
		all = sharding.Union(all, s.Held)
	}
	require.True(m, all.Everything(), "%s", all)
	return out
}

func (m *mesh) shardOf(p *corev1.Pod) string {
	for _, a := range m.get().Status.Root.Assignments {
		if a.UID == string(p.UID) {
			return a.Shard
		}
	}
	return ""
}

func TestShardsOutOfARoot(t *testing.T) {
	m := newMesh(t)
	m.root(2, 1)
	a, b := m.pod(0), m.pod(1)
	m.settle()
	require.Len(t, m.held(), 2)
	require.Equal(t, "op-1-normal", m.shardOf(a))
	require.Equal(t, "op-2-normal", m.shardOf(b))
	require.Equal(t, "op-2-normal", m.policies[b.UID].Sharding.Shard)
	require.EqualValues(t, requestTimeout.Seconds(), m.policies[b.UID].Sharding.RequestTimeoutSeconds)
	require.Contains(t, m.get().Finalizers, v1alpha1.HandoverFinalizer)

	children := m.children()
	require.Len(t, children, 2)
	require.Equal(t, "op", children["op-1-normal"].Labels[v1alpha1.RootLabel])
	require.Equal(t, map[string]string{v1alpha1.ShardLabel: "op-1-normal"}, children["op-1-normal"].Spec.Selector.MatchLabels)
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(a), a))
	require.Equal(t, "op-1-normal", a.Labels[v1alpha1.ShardLabel])

	// What others write of it is undone, and moves nothing.
	a.Labels[v1alpha1.ShardLabel] = "op-2-normal"
	require.NoError(t, m.Update(t.Context(), a))
	child := children["op-1-normal"]
	child.Spec.Limits = nil
	require.NoError(t, m.Update(t.Context(), child))
	m.settle()
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(a), a))
	require.Equal(t, "op-1-normal", a.Labels[v1alpha1.ShardLabel])
	require.Len(t, m.children()["op-1-normal"].Spec.Limits, 1)
	require.Equal(t, "op-1-normal", m.shardOf(a))
}

func (m *mesh) children() map[string]*v1alpha1.ShardingConfig {
	out := map[string]*v1alpha1.ShardingConfig{}
	for _, c := range m.world().Configs {
		if c.Spec.Root == nil {
			out[c.Name] = c
		}
	}
	return out
}

// A pod is in no shard before its agent has said that it acts on nothing.
func TestAPodJoinsOnceItIsRefused(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	m.deaf[string(p.UID)] = true
	m.settle()
	require.Empty(t, m.shardOf(p))
	require.True(t, m.policies[p.UID].GetSharding().GetStandby())
	m.seen[string(p.UID)] = push.Observation{Known: true, Capture: v1alpha1.CaptureEBPF, Version: "what it was told before"}
	m.settle()
	require.Empty(t, m.shardOf(p))
	delete(m.deaf, string(p.UID))
	m.settle()
	require.Equal(t, "op-1-normal", m.shardOf(p))
}

// A shard is added: what it takes is first let go of by whoever had it.
func TestHandover(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	a := m.pod(0)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	b := m.pod(1)
	m.deaf[string(a.UID)] = true
	m.settle()
	require.Equal(t, "op-2-normal", m.shardOf(b))
	require.True(t, m.held()["op-2-normal"].Empty(), "a has not let go")
	require.Equal(t, "Releasing", m.get().Status.Root.Handovers[0].Phase)
	delete(m.deaf, string(a.UID))
	m.settle()
	require.False(t, m.held()["op-2-normal"].Empty())
	require.Empty(t, m.get().Status.Root.Handovers)

	// a held objects in its caches that are another shard's now.
	err := m.Get(t.Context(), client.ObjectKeyFromObject(a), a)
	require.True(t, apierrors.IsNotFound(err), "it was evicted")
	require.NoError(t, m.round())
	m.push()
	c := m.pod(0)
	m.settle()
	require.Equal(t, "op-1-normal", m.shardOf(c))
	require.Len(t, m.get().Status.Root.Assignments, 2, "a is proven gone")
}

// A new leader goes on with the plan, though one of its shards waits for a pod that
// is ready: what others hold by now does not move again.
func TestAPlanSurvivesItsLeader(t *testing.T) {
	m := newMesh(t)
	m.root(2, 1)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.OnChange = v1alpha1.OnChangeRelist })
	m.pod(0)
	m.pod(1)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 5 })
	m.pod(2)
	m.pod(3)
	m.settle()
	before, err := Load(m.get().Status.Root)
	require.NoError(t, err)
	last := before.Shards["op-5-normal"]
	require.False(t, last.Wanted.Empty())
	require.True(t, last.Held.Empty(), "it has no pod")

	m.lead()
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.TokenBinding = v1alpha1.TokenBindingOff })
	m.settle()
	after, err := Load(m.get().Status.Root)
	require.NoError(t, err)
	require.Equal(t, before.Shards, after.Shards)

	m.pod(4)
	m.settle()
	require.True(t, m.held()["op-5-normal"].Equal(last.Wanted))
}

// What was begun is not taken back because agents are away for a moment: they come
// to a new leader one by one, and are replaced.
func TestAgentsThatAreAwayTakeNothingBack(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	a := m.pod(0)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	b := m.pod(1)
	m.deaf[string(a.UID)] = true
	m.settle()
	before := m.get().Status.Root
	require.Len(t, before.Handovers, 1)
	goesOn := func() {
		m.settle()
		require.Equal(t, durable(before), durable(m.get().Status.Root))
	}

	m.lead()
	m.away[a.Spec.NodeName], m.away[b.Spec.NodeName] = true, true
	goesOn()
	clear(m.away)
	m.now = m.now.Add(status.Grace)
	goesOn()
	m.away[b.Spec.NodeName] = true
	goesOn()

	// A leader that has not heard what a acts on does not know whether it owns that still.
	m.now = m.now.Add(status.Grace)
	goesOn()
}

func TestKeysAreTakenBackFromAShardWithoutAgent(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	a := m.pod(0)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	b := m.pod(1)
	m.deaf[string(a.UID)] = true
	m.settle()
	require.Len(t, m.get().Status.Root.Handovers, 1)
	m.away[b.Spec.NodeName] = true
	m.now = m.now.Add(status.Grace)
	m.settle()
	require.Empty(t, m.get().Status.Root.Handovers)
	require.True(t, m.held()["op-1-normal"].Everything())
}

// A budget keeps a pod from being evicted: that is said, and tried again.
func TestEvictionsAwaitTheBudget(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	a := m.pod(0)
	m.settle()
	asked := 0
	m.funcs.SubResourceCreate = func(_ context.Context, _ client.Client, sub string, _, s client.Object, _ ...client.SubResourceCreateOption) error {
		asked++
		require.Equal(t, "eviction", sub)
		require.Equal(t, a.UID, *s.(*policyv1.Eviction).DeleteOptions.Preconditions.UID)
		return apierrors.NewTooManyRequests("the budget does not allow it", 10)
	}
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.pod(1)
	m.settle()
	require.Equal(t, 1, asked)
	require.True(t, slices.ContainsFunc(m.get().Status.Conditions, func(c metav1.Condition) bool {
		return c.Status == metav1.ConditionTrue && len(c.Message) > 0
	}))
	m.now = m.now.Add(askAgain)
	m.funcs.SubResourceCreate = nil
	m.settle()
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(a), a)))
}

// stale is a mesh where op-0 and op-1, of shard 1, are stale. They were not evicted,
// for a budget kept them; it does no more.
func stale(t *testing.T) (m *mesh, evicted *[]string) {
	m, evicted = newMesh(t), &[]string{}
	m.funcs.SubResourceCreate = func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
		return apierrors.NewTooManyRequests("the budget does not allow it", 10)
	}
	m.root(1, 2)
	for i := range 4 {
		m.pod(i)
	}
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.settle()
	require.Len(t, slices.DeleteFunc(m.get().Status.Root.Assignments, func(a v1alpha1.Assignment) bool { return !a.Stale }), 2)
	m.now = m.now.Add(time.Minute)
	m.funcs.SubResourceCreate = func(ctx context.Context, c client.Client, sub string, o, s client.Object, opts ...client.SubResourceCreateOption) error {
		*evicted = append(*evicted, o.GetName())
		return c.SubResource(sub).Create(ctx, o, s, opts...)
	}
	return m, evicted
}

// Agents that were not heard of are no reason to evict anybody.
func TestALeaderThatHeardNobodyEvictsNobody(t *testing.T) {
	m, evicted := stale(t)
	m.lead()
	for i := range 4 {
		m.away[fmt.Sprintf("node-%d", i)] = true
	}
	require.NoError(t, m.round())
	require.Empty(t, *evicted)
}

// workload is the StatefulSet of the pods.
func (m *mesh) workload(replicas int32) {
	require.NoError(m, m.Create(m.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"}, Spec: appsv1.StatefulSetSpec{Replicas: &replicas},
	}))
}

// Nobody waits for the successor of a pod that was evicted just before its workload was scaled down.
func TestNoSuccessorOfASmallerWorkload(t *testing.T) {
	m, evicted := stale(t)
	m.workload(3)
	for range 10 {
		require.NoError(t, m.round())
		m.push()
		m.now = m.now.Add(10 * time.Second)
	}
	require.Len(t, *evicted, 2)
}

// Successors are waited for, however long it takes, and until they are members.
func TestNoSuccessorNoEviction(t *testing.T) {
	m, evicted := stale(t)
	m.workload(4)
	for range 60 {
		require.NoError(t, m.round())
		m.push()
		m.now = m.now.Add(10 * time.Second)
	}
	require.Len(t, *evicted, 1)
	require.Contains(t, fmt.Sprint(m.get().Status.Conditions), "its successor does not exist yet")
	var n int
	_, err := fmt.Sscanf((*evicted)[0], "op-%d", &n)
	require.NoError(t, err)
	p := m.pod(n)
	m.deaf[string(p.UID)] = true
	m.settle()
	require.Len(t, *evicted, 1, "it is in no shard yet")
	clear(m.deaf)
	m.settle()
	require.Len(t, *evicted, 2)
}

// Nor are agents that have yet to confirm the last change.
func TestAChangeEvictsNobodyWhileOneIsMissing(t *testing.T) {
	m, evicted := stale(t)
	p := &corev1.Pod{}
	require.NoError(t, m.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: "op-2"}, p))
	p.Status.Conditions[0].Status = corev1.ConditionFalse
	require.NoError(t, m.Status().Update(t.Context(), p))
	m.settle()
	require.Empty(t, *evicted)
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.TokenBinding = v1alpha1.TokenBindingOff })
	for uid := range m.seen {
		m.deaf[uid] = true
	}
	m.settle()
	require.Empty(t, *evicted)
	clear(m.deaf)
	p.Status.Conditions[0].Status = corev1.ConditionTrue
	require.NoError(t, m.Status().Update(t.Context(), p))
	m.settle()
	require.Len(t, *evicted, 1)
}

// A leader that ends between a write and its telling, or before the write, leaves
// nothing behind that the next does not go on from.
func TestTheNextLeaderGoesOn(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	m.pod(0)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 3 })
	m.pod(1)
	m.pod(2)
	m.funcs.SubResourceCreate = func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
		return apierrors.NewTooManyRequests("not now", 1) // so that all stay
	}
	fail := false
	m.funcs.SubResourceUpdate = func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
		err := c.SubResource(sub).Update(ctx, o, opts...)
		if fail {
			return errors.Join(errors.New("the connection broke"), err)
		}
		return err
	}
	for i := range 40 {
		fail = i%3 == 0
		_ = m.round() // fails now and then, written or not
		if i%4 != 0 {
			m.push()
		}
		if i%5 == 0 {
			m.lead()
		}
		m.now = m.now.Add(time.Second)
	}
	fail = false
	m.settle()
	held := m.held()
	require.Len(t, held, 3)
	for name, s := range held {
		require.False(t, s.Empty(), name)
	}
	require.Empty(t, m.get().Status.Root.Handovers)
}

// What somebody else wrote is what is: a leader that leads no more tells of nothing.
func TestConflict(t *testing.T) {
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	require.NoError(t, m.round())
	m.push()
	old := m.Roots

	// Something else changed: that is no reason to stop.
	m.change(func(c *v1alpha1.ShardingConfig) { metav1.SetMetaDataLabel(&c.ObjectMeta, "a", "b") })
	m.settle()
	require.Equal(t, "op-1-normal", m.shardOf(p))

	m.lead()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
	m.pod(1)
	m.settle()
	current := m.Roots
	written := m.get().Status.Root

	m.Roots = old
	m.pod(2) // it would write something
	require.ErrorContains(t, m.round(), "another manager has written")
	require.Equal(t, durable(written), durable(m.get().Status.Root))
	m.Roots = current
	m.settle()
}

// A fresh leader says nothing before it has read what the last one wrote.
func TestAFreshLeaderIsSilent(t *testing.T) {
	m := newMesh(t)
	root := m.root(1, 1)
	p := m.pod(0)
	m.settle()
	sent := m.policies[p.UID]
	m.lead()
	_, ok := m.Known(m.world().Configs, namespaces)
	require.False(t, ok)
	_, ok = m.Known(nil, namespaces)
	require.True(t, ok, "without roots there is nothing to wait for")
	require.NoError(t, m.round())
	m.push()
	require.Equal(t, sent.Version, m.policies[p.UID].Version)

	// One whose state makes no sense is left out, and says so.
	c := m.get()
	c.Status.Root.Shards[0].Held = []string{"x"}
	require.NoError(t, m.Status().Update(t.Context(), c))
	m.lead()
	require.ErrorContains(t, m.round(), "status.root.shards[op-1-normal].held")
	known, ok := m.Known([]*v1alpha1.ShardingConfig{root}, namespaces)
	require.True(t, ok)
	require.Empty(t, known)
}

// A pod whose object is gone may run still.
func TestVanishedMembers(t *testing.T) {
	for _, c := range []struct {
		what string
		do   func(m *mesh, p *corev1.Pod)
	}{
		{"its agent refuses it", func(m *mesh, p *corev1.Pod) { delete(m.away, p.Spec.NodeName) }},
		{"its node is gone", func(m *mesh, p *corev1.Pod) {
			m.nodes[p.Spec.NodeName] = true
			m.settle()
			m.now = m.now.Add(requestTimeout + meshv1.LostWrite)
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := newMesh(t)
			m.root(1, 1)
			p := m.pod(0)
			m.settle()
			m.away[p.Spec.NodeName] = true
			require.NoError(t, m.Delete(t.Context(), p))
			m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Auto.ShardingSize = 2 })
			m.pod(1)
			m.settle()
			require.Equal(t, "op-1-normal", m.shardOf(p))
			require.NotEmpty(t, m.policies[p.UID].Refuse)
			require.True(t, m.held()["op-2-normal"].Empty())

			m.now = m.now.Add(status.BlockedAfter + time.Second)
			require.NoError(t, m.round())
			require.NoError(t, m.round())
			blocked := 0
			for len(m.recorder.Events) > 0 {
				if e := <-m.recorder.Events; strings.HasPrefix(e, "Warning HandoverBlocked") {
					blocked++
					require.Contains(t, e, p.Name)
				}
			}
			require.Equal(t, 1, blocked)

			c.do(m, p)
			m.settle()
			require.Empty(t, m.shardOf(p))
			require.False(t, m.held()["op-2-normal"].Empty())
		})
	}
}

// A pod may be marked as failed before its containers have ended, as PodGC does.
func TestMembersThatEnded(t *testing.T) {
	for _, c := range []struct {
		what string
		do   func(m *mesh, p *corev1.Pod)
	}{
		{"its agent refuses it", func(m *mesh, p *corev1.Pod) { delete(m.deaf, string(p.UID)) }},
		{"its agent has been away for long", func(m *mesh, p *corev1.Pod) {
			m.away[p.Spec.NodeName] = true
			m.settle()
			m.now = m.now.Add(requestTimeout + meshv1.LostWrite)
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := newMesh(t)
			m.root(1, 1)
			p := m.pod(0)
			m.settle()
			m.deaf[string(p.UID)], m.nodes[p.Spec.NodeName] = true, true
			p = get(m, p)
			p.Status.Phase = corev1.PodFailed
			require.NoError(t, m.Status().Update(t.Context(), p))
			m.settle()
			m.now = m.now.Add(requestTimeout + meshv1.LostWrite)
			m.settle()
			require.NotEmpty(t, m.shardOf(p), "its agent is connected, and has not confirmed")
			c.do(m, p)
			m.settle()
			require.Empty(t, m.shardOf(p))
		})
	}
}

// The end of a pod is proven a request timeout after both its agent fell silent and its
// end was seen: the agent may be alive, and have let a request through until then.
func TestMemberOfASilentAgentEndsARequestTimeoutLater(t *testing.T) {
	end := map[string]func(m *mesh, p *corev1.Pod){
		"failed": func(m *mesh, p *corev1.Pod) {
			p = get(m, p)
			p.Status.Phase = corev1.PodFailed
			require.NoError(m, m.Status().Update(m.Context(), p))
		},
		"its Node is deleted": func(m *mesh, p *corev1.Pod) {
			m.nodes[p.Spec.NodeName] = true
			require.NoError(m, m.Delete(m.Context(), p))
		},
	}
	for name, end := range end {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.root(1, 1)
			p := m.pod(0)
			m.settle()
			m.away[p.Spec.NodeName] = true
			m.later(10 * time.Minute)
			end(m, p)
			m.goOn(requestTimeout, nil)
			require.NotEmpty(t, m.shardOf(p))
			m.lead() // which has not seen the end before
			m.goOn(requestTimeout, nil)
			require.NotEmpty(t, m.shardOf(p))
			m.goOn(meshv1.LostWrite+2*time.Second, nil)
			require.Empty(t, m.shardOf(p))
		})
	}

	t.Run("deleted by force", func(t *testing.T) {
		m := newMesh(t)
		m.root(1, 1)
		p := m.pod(0)
		m.settle()
		m.away[p.Spec.NodeName] = true
		require.NoError(t, m.Delete(t.Context(), p))
		m.later(time.Hour)
		require.NotEmpty(t, m.shardOf(p), "it runs on, on a node that exists")
	})
}

func get(m *mesh, p *corev1.Pod) *corev1.Pod {
	require.NoError(m, m.Get(m.Context(), client.ObjectKeyFromObject(p), p))
	return p
}

// Under disable pods are restarted one by one, within a budget, and run unsharded
// once nothing is held. They are ready unless they are refused.
func TestDisable(t *testing.T) {
	m := newMesh(t)
	m.funcs.SubResourceCreate = func(ctx context.Context, c client.Client, sub string, o, s client.Object, opts ...client.SubResourceCreateOption) error {
		var pods corev1.PodList
		require.NoError(t, m.List(ctx, &pods))
		if len(pods.Items) < 3 || slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return m.policies[p.UID].GetRefuse() != "" }) {
			return apierrors.NewTooManyRequests("the budget does not allow it", 10)
		}
		return c.SubResource(sub).Create(ctx, o, s, opts...)
	}
	m.root(3, 1)
	b := m.pod(1)
	m.pod(0)
	m.pod(2)
	m.settle()
	m.deaf[string(b.UID)] = true
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
	m.settle()
	m.settle()
	require.Len(t, m.world().Pods, 3, "b acts on what it held: a successor would be refused")
	clear(m.deaf)
	for i := 0; i < 20 && len(m.get().Status.Root.Assignments) > 0; i++ {
		m.settle()
		for n := range 3 {
			if apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: fmt.Sprintf("op-%d", n)}, &corev1.Pod{})) {
				m.pod(n)
			}
		}
		m.now = m.now.Add(askAgain)
	}
	m.settle()
	root := m.get().Status.Root
	require.Empty(t, root.Assignments)
	require.Empty(t, root.Shards)
	require.Empty(t, m.children())
	require.Len(t, m.policies, 3)
	for _, p := range m.policies {
		require.Empty(t, p.Refuse)
		require.Nil(t, p.Sharding)
	}

	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
	m.settle()
	require.Len(t, m.held(), 3)
}

// Shards are given nothing while a pod may run unsharded, though they have members.
func TestEnableAgain(t *testing.T) {
	m := newMesh(t)
	m.root(2, 1)
	m.pod(0)
	m.pod(1)
	m.settle()
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) })
	m.settle()
	require.Len(t, m.world().Pods, 1)
	var p *corev1.Pod
	for n := range 2 {
		if apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKey{Namespace: "ns", Name: fmt.Sprintf("op-%d", n)}, &corev1.Pod{})) {
			p = m.pod(n)
		}
	}
	m.funcs.SubResourceCreate = func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
		return apierrors.NewTooManyRequests("the budget does not allow it", 10)
	}
	m.settle()
	require.Empty(t, m.policies[p.UID].Refuse)
	require.Len(t, m.get().Status.Root.Assignments, 1)

	m.away[p.Spec.NodeName] = true
	m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil })
	m.settle()
	state, err := Load(m.get().Status.Root)
	require.NoError(t, err)
	require.False(t, state.Holds())
	clear(m.away)
	m.settle()
	require.Len(t, m.held(), 2)
	require.Len(t, m.get().Status.Root.Assignments, 2)
}

// Under foreground deletion the garbage collector deletes children first.
func TestChildrenAreNotMadeUnderADeletedRoot(t *testing.T) {
	m := newMesh(t)
	m.root(2, 1)
	a := m.pod(0)
	m.pod(1)
	m.settle()
	m.deaf[string(a.UID)] = true
	require.NoError(t, m.Delete(t.Context(), m.get()))
	m.settle()
	for _, c := range m.children() {
		require.NoError(t, m.Delete(t.Context(), c))
	}
	require.NoError(t, m.round())
	require.Empty(t, m.children())
}

// Nobody is given anything while another pod may act on everything: it ran unsharded
// when it was heard of last, or by a state that was lost.
func TestNothingIsGivenWhileAPodRunsUnsharded(t *testing.T) {
	for _, c := range []struct {
		what        string
		first, next func(m *mesh)
	}{
		{"disabled and enabled again",
			func(m *mesh) { m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = new(true) }) },
			func(m *mesh) { m.change(func(c *v1alpha1.ShardingConfig) { c.Spec.Root.Disable = nil }) }},
		{"status lost", func(*mesh) {}, func(m *mesh) {
			c := m.get()
			c.Status = v1alpha1.ShardingConfigStatus{}
			require.NoError(m, m.Status().Update(m.Context(), c))
			m.lead()
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			m := newMesh(t)
			m.root(2, 1)
			c.first(m)
			a, b := m.pod(0), m.pod(1)
			m.settle()
			require.Empty(t, m.policies[b.UID].Refuse)
			c.next(m)
			m.away[b.Spec.NodeName] = true // it goes on as it was told last
			m.settle()
			require.Empty(t, m.shardOf(a))
			require.Empty(t, m.get().Status.Root.Shards)
			ready := apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionReady)
			require.Contains(t, ready.Message, b.Name)
			delete(m.away, b.Spec.NodeName)
			m.settle()
			m.goOn(locksProven, nil)
			require.NotEmpty(t, m.shardOf(a))
			require.Len(t, m.held(), 2)
		})
	}
}

// A root that is deleted stays until nobody acts on its shards.
func TestDelete(t *testing.T) {
	m := newMesh(t)
	root := m.root(2, 1)
	p := m.pod(0)
	m.pod(1)
	m.settle()
	m.away[p.Spec.NodeName] = true
	require.NoError(t, m.Delete(t.Context(), root))
	m.settle()
	require.NotEmpty(t, m.get().Status.Root.Handovers[0].WaitsFor)
	require.Contains(t, m.get().Status.Root.Handovers[0].WaitsFor[0], p.Spec.NodeName)
	delete(m.away, p.Spec.NodeName)
	m.settle()
	require.Len(t, m.world().Pods, 1, "members are replaced one by one")
	require.NoError(t, m.Get(t.Context(), client.ObjectKeyFromObject(root), root))
	require.Empty(t, m.holder("lock"), "successors can lead")
	m.replace(2)
	m.settle()
	require.True(t, apierrors.IsNotFound(m.Get(t.Context(), client.ObjectKeyFromObject(root), root)))
	require.Empty(t, m.world().Configs)
	for _, p := range m.world().Pods {
		require.Equal(t, v1alpha1.TrustBoth, p.Annotations[v1alpha1.TrustAnnotation])
	}
}

// replace makes the pods that were evicted anew, admitted as they are now.
func (m *mesh) replace(replicas int) {
	for n := range replicas {
		if apierrors.IsNotFound(m.Get(m.Context(), client.ObjectKey{Namespace: "ns", Name: fmt.Sprintf("op-%d", n)}, &corev1.Pod{})) {
			p := m.pod(n)
			p.Annotations[v1alpha1.TrustAnnotation] = compile.Trust(m.get())
			require.NoError(m, m.Update(m.Context(), p))
		}
	}
	m.now = m.now.Add(askAgain)
}

// holder is who holds a lock.
func (m *mesh) holder(name string) string {
	lease := &coordinationv1.Lease{}
	require.NoError(m, m.Get(m.Context(), client.ObjectKey{Namespace: "ns", Name: name}, lease))
	return *lease.Spec.HolderIdentity
}

// In a rollout shards lack pods for a moment: nobody is restarted for that.
func TestOutOfPlaceForAMoment(t *testing.T) {
	var p plan
	start := time.Unix(1000, 0)
	require.Empty(t, p.lasting([]string{"a", "b"}, start))
	require.Empty(t, p.lasting([]string{"a"}, start.Add(outdatedFor/2)))
	require.Equal(t, []string{"a"}, p.lasting([]string{"a", "b"}, start.Add(outdatedFor)), "b was in its place for a while")
}
