package roots

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
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
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
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
	resolver Resolver
	compiled compile.Result
	by       *Enacted                       // of compiled
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
	// activity is what agents count, by pod uid.
	activity map[string][]*meshv1.ResourceActivity
	outcomes map[string]push.Outcomes // likewise
	// leaders are the pods, by uid, that hold locks, each with its name upstream.
	leaders map[[2]string]string
	// idle pods contend for no lock.
	idle        map[string]bool
	removed     []push.Removed
	labels      map[string]labels.Set // of namespaces
	unknown     resources.Unknown     // what the root names
	reads       error                 // of StatefulSets
	unconnected []string              // nodes
	// asked are the queries of the last round, and answers those to each expression.
	asked   []query.Query
	answers map[string]query.Answer
}

// evaluator answers the queries of a mesh's roots.
type evaluator struct{ *mesh }

func (e evaluator) Set(queries []query.Query) { e.asked = queries }

func (e evaluator) Answers(root types.UID) map[query.Query]query.Answer {
	out := map[query.Query]query.Answer{}
	for _, q := range e.asked {
		if a, ok := e.answers[q.Expression]; ok && q.Root == root {
			out[q] = a
		}
	}
	return out
}

const requestTimeout = 90 * time.Second

// Times of package decide.
const (
	outsideRarely = decide.OutsideRarely
	outdatedFor   = 30 * time.Second
	askAgain      = 10 * time.Second
)

var namespaces = []string{"blue", "green", "red", "white"}

func newMesh(t *testing.T) *mesh {
	scheme := runtime.NewScheme()
	require.NoError(t, clientgoscheme.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	require.NoError(t, serve.AddToScheme(scheme))
	m := &mesh{
		T: t, recorder: events.NewFakeRecorder(1000), now: time.Unix(1e9, 0),
		seen: map[string]push.Observation{}, observed: map[string][]push.ObservedLock{}, idle: map[string]bool{}, away: map[string]bool{}, nodes: map[string]bool{}, deaf: map[string]bool{}, floors: map[string]int64{}, inForce: map[string]compile.Policy{},
	}
	// Nothing is applied, so the fields' managers need not be tracked, which costs most of the time.
	tracker := clienttesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder())
	m.Client = fake.NewClientBuilder().WithScheme(scheme).WithObjectTracker(tracker).WithStatusSubresource(append(serve.Objects(), &v1alpha1.ShardingConfig{})...).WithInterceptorFuncs(interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if _, ok := o.(*appsv1.StatefulSet); ok && m.reads != nil {
				return m.reads
			}
			if f := m.funcs.Get; f != nil {
				return f(ctx, c, key, o, opts...)
			}
			return c.Get(ctx, key, o, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if f := m.funcs.Patch; f != nil {
				return f(ctx, c, o, patch, opts...)
			}
			return c.Patch(ctx, o, patch, opts...)
		},
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
	m.resolver = Resolver{}
	m.keeper = &locks.Keeper{Client: m.Client, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return m.now }}
	m.Roots = &Roots{
		Locks: m.keeper, Client: m.Client, Recorder: m.recorder, Weigher: &weigh.Weigher{FirstWithin: time.Nanosecond, Changed: func() {}}, Queries: evaluator{m}, Log: slog.New(slog.DiscardHandler),
		Account: types.NamespacedName{Namespace: "ctrlmesh-system", Name: "ctrlmesh-manager"},
		Now:     func() time.Time { return m.now }, Written: func() {}, Others: Others{MissingBundle: func(string) string { return "" }}, Asked: func() {},
		Observe: func(node, uid string) push.Observation {
			if !m.away[node] {
				m.left[node] = m.now
			} else if m.left[node].IsZero() {
				return push.Observation{}
			}
			o := m.seen[uid]
			o.Connected, o.Left = !m.away[node], m.left[node]
			o.ObservedLocks, o.Activity, o.Outcomes = m.observed[uid], m.activity[uid], m.outcomes[uid]
			for lock, leader := range m.leaders {
				if leader == uid {
					o.HeldLocks = append(o.HeldLocks, lock[0])
				}
			}
			return o
		},
	}
	m.compiled, m.policies, m.by, m.asked = compile.Result{}, nil, nil, nil
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

func get(m *mesh, p *corev1.Pod) *corev1.Pod {
	require.NoError(m, m.Get(m.Context(), client.ObjectKeyFromObject(p), p))
	return p
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

func (m *mesh) world() Input {
	w := Input{Compiled: m.compiled, CompiledBy: m.by, Removed: m.removed, Unconnected: m.unconnected, Namespaces: namespaces, RequestTimeout: requestTimeout, Node: func(name string) bool { return !m.nodes[name] }}
	var configs v1alpha1.ShardingConfigList
	var pods corev1.PodList
	require.NoError(m, m.List(m.Context(), &configs))
	require.NoError(m, m.List(m.Context(), &pods))
	for i := range configs.Items {
		w.Configs = append(w.Configs, &configs.Items[i])
	}
	if known, ok := m.States(w.Configs, w.Namespaces); ok {
		w.Enacted = Enact(w.Configs, known)
	}
	w.Unresolved = m.resolver.Resolve(w.Configs, m.labels, time.Minute).Errors
	w.Unknown = map[types.UID]resources.Unknown{"root": m.unknown}
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
	known, ok := m.States(w.Configs, w.Namespaces)
	if !ok {
		return
	}
	m.compiled = compile.Compile(w.Configs, w.Pods, known, compile.Rules{RequestTimeout: requestTimeout})
	m.policies, m.by = m.compiled.Policies, w.Enacted
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
	m.seen[uid] = push.Observation{Reported: true, Capture: v1alpha1.CaptureEBPF, Version: p.Version, Serial: serial, Barred: barred && !m.oldAgents}
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
		_, err := decide.Load(c.Status.Root) // says so
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
		_, err := m.keeper.Round(m.Context(), demands, func(types.NamespacedName) bool { return false }, noOverlap)
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
func (m *mesh) owned() map[string]sharding.Scope {
	m.Helper()
	state, err := decide.Load(m.get().Status.Root)
	require.NoError(m, err)
	out := map[string]sharding.Scope{}
	var all sharding.Scope
	for name, s := range state.Shards {
		out[name] = s.Owned
		all = sharding.Union(all, s.Owned)
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

func (m *mesh) children() map[string]*v1alpha1.ShardingConfig {
	out := map[string]*v1alpha1.ShardingConfig{}
	for _, c := range m.world().Configs {
		if c.Spec.Root == nil {
			out[c.Name] = c
		}
	}
	return out
}

// holder is who holds a lock.
func (m *mesh) holder(name string) string {
	lease := &coordinationv1.Lease{}
	require.NoError(m, m.Get(m.Context(), client.ObjectKey{Namespace: "ns", Name: name}, lease))
	return *lease.Spec.HolderIdentity
}

// sharded returns a mesh with a root of shards with one replica each, and their pods, once it
// has settled.
func sharded(t *testing.T, shards int) (m *mesh, pods []*corev1.Pod) {
	m = newMesh(t)
	m.root(int32(shards), 1)
	for n := range shards {
		pods = append(pods, m.pod(n))
	}
	m.settle()
	return m, pods
}

// refuseEvictions makes a disruption budget refuse all evictions.
func (m *mesh) refuseEvictions() {
	m.funcs.SubResourceCreate = func(context.Context, client.Client, string, client.Object, client.Object, ...client.SubResourceCreateOption) error {
		return apierrors.NewTooManyRequests("the budget does not allow it", 10)
	}
}

// find is the root as it is written; nil if it does not exist.
func (m *mesh) find() *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{}
	err := m.Get(m.Context(), types.NamespacedName{Namespace: "ns", Name: "op"}, c)
	if apierrors.IsNotFound(err) {
		return nil
	}
	require.NoError(m, err)
	return c
}

// get is the root as it is written.
func (m *mesh) get() *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{}
	require.NoError(m, m.Get(m.Context(), types.NamespacedName{Namespace: "ns", Name: "op"}, c))
	return c
}

func noOverlap(_, _ types.NamespacedName) (string, bool) { return "", true }
