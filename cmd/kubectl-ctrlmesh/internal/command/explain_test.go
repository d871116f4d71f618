package command

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// subsets lets the root have the subset big, whose shard is the first, and the default subset. Only the
// latter writes cluster-scoped objects.
func subsets(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Spec.Root.Auto, r.Spec.Root.ClusterScoped = nil, v1alpha1.ClusterScopedDefaultOnly
	r.Spec.Root.Subsets = []v1alpha1.Subset{{Name: "big", PodLabels: map[string]string{"size": "big"}, Namespaces: []v1alpha1.NamespaceMatch{{Names: []string{"team-43"}}}}}
	r.Spec.Root.ResourceSelector[0].RelateResources = append(r.Spec.Root.ResourceSelector[0].RelateResources, v1alpha1.ResourceGroup{APIGroups: []string{"rbac.authorization.k8s.io"}, Resources: []string{"clusterroles"}})
	r.Spec.Root.DefaultOnlyUserAgents = []string{"reporter/*"}
	for i, name := range []string{"operator-demo-big", "operator-demo-default"} {
		r.Status.Root.Shards[i].Name, r.Status.Root.Assignments[i].Shard = name, name
	}
}

// byUID is byObject with an object of each shard.
func byUID(t *testing.T, c *meshtest.Cluster) {
	byObject(t, c)
	root(t, c).Spec.Root.ResourceSelector[0].RelateResources = []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}
	first, err := sharding.Parse(meshtest.Halves[:1])
	require.NoError(t, err)
	names := map[bool]string{true: "own", false: "foreign"}
	for i := 0; len(names) > 0; i++ {
		uid := fmt.Sprintf("uid-%d", i)
		if name := names[first.Owns(uid)]; name != "" {
			c.Add(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "team-42", Name: name, UID: types.UID(uid)}})
			delete(names, first.Owns(uid))
		}
	}
}

// readsOwn has gets of objects of other shards refused.
func readsOwn(plant func(*testing.T, *meshtest.Cluster)) func(*testing.T, *meshtest.Cluster) {
	return func(t *testing.T, c *meshtest.Cluster) {
		plant(t, c)
		root(t, c).Spec.Reads = v1alpha1.ReadsOwn
	}
}

// tries lets the root be a dry run, with two pods.
func tries(t *testing.T, c *meshtest.Cluster) {
	r := root(t, c)
	r.Spec.DryRun = true
	r.Status.Root.Shards, r.Status.Root.Assignments = nil, nil
	for i, name := range []string{"od-0", "od-1"} {
		pod := meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, name)
		pod.Name, pod.Labels[v1alpha1.ShardLabel] = fmt.Sprintf("%s-%d", meshtest.Operator, i), ""
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: meshtest.Operator, UID: "uid-of-the-set", Controller: new(true)}}
	}
}

// between lets the first shard have released the key team-42, before the second one receives it.
func between(t *testing.T, c *meshtest.Cluster) {
	handsOver(t, c)
	r := root(t, c)
	r.Status.Root.Shards[0].Held = r.Status.Root.Shards[0].Target
	r.Status.Root.Handovers[0].Phase = "Granting"
}

// failsOpen lets pods pass without their agents, and removes that of the second node.
func failsOpen(t *testing.T, c *meshtest.Cluster) {
	losesAgent(t, c)
	root(t, c).Spec.FailurePolicy = v1alpha1.FailOpen
	meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, "od-1").Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
}

// failsOpenByIPTables is failsOpen, with pods that iptables captures.
func failsOpenByIPTables(t *testing.T, c *meshtest.Cluster) {
	failsOpen(t, c)
	for i := range root(t, c).Status.Pods {
		root(t, c).Status.Pods[i].Capture = v1alpha1.CaptureIPTables
	}
}

// confined lets the shards act in namespaces with a label alone.
func confined(t *testing.T, c *meshtest.Cluster) {
	root(t, c).Spec.Root.ResourceSelector[0].Namespaces = []v1alpha1.NamespaceMatch{{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"tenant": "yes"}}}}
}

// unlabelled removes the label of a pod.
func unlabelled(t *testing.T, c *meshtest.Cluster) {
	delete(meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, "od-1").Labels, v1alpha1.EnableProxyLabel)
}

// observed lets no ShardingConfig select a pod.
func observed(t *testing.T, c *meshtest.Cluster) {
	pod := meshtest.Pod(meshtest.Operator, "seen-0", "node-1")
	pod.Labels = map[string]string{v1alpha1.EnableProxyLabel: "true"}
	pod.Annotations = map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustBoth}
	c.Add(pod)
}

// conflicts lets a second ShardingConfig select the pod of the hand-written one.
func conflicts(t *testing.T, c *meshtest.Cluster) {
	other := meshtest.Find[*v1alpha1.ShardingConfig](t, c, meshtest.Operator, "by-hand").DeepCopy()
	other.Name, other.UID = "again", "uid-of-again"
	c.Add(other)
}

// passesThrough has the mesh not read the requests of a pod.
func passesThrough(t *testing.T, c *meshtest.Cluster) {
	by := meshtest.Find[*v1alpha1.ShardingConfig](t, c, meshtest.Operator, "by-hand")
	by.Spec.Limits, by.Spec.ClientCertificates = nil, v1alpha1.ClientCertificatesPassthrough
	meshtest.Find[*corev1.Pod](t, c, meshtest.Operator, "bh-0").Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth
}

// shadows makes the hand-written shard a shadow.
func shadows(t *testing.T, c *meshtest.Cluster) {
	meshtest.Find[*v1alpha1.ShardingConfig](t, c, meshtest.Operator, "by-hand").Spec.Shadow = &v1alpha1.Shadow{Window: "30s"}
}

// limits adds a CircuitBreaker whose rule has a state in a pod.
func limits(state v1alpha1.BreakerState, change func(*v1alpha1.CircuitBreaker)) func(*testing.T, *meshtest.Cluster) {
	return func(_ *testing.T, c *meshtest.Cluster) {
		b := &v1alpha1.CircuitBreaker{
			ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "writes", UID: "uid-of-writes", Generation: 1},
			Spec: v1alpha1.CircuitBreakerSpec{Selector: &metav1.LabelSelector{}, RateLimitings: []v1alpha1.Limiting{
				{Name: "all", ResourceRules: []v1alpha1.ResourceRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}, Namespaces: []string{"*"}}}, Bucket: &v1alpha1.Bucket{Burst: 100, Interval: "1s", Limit: 100}},
				{Name: "foos", ResourceRules: []v1alpha1.ResourceRule{{APIGroups: []string{"example.com"}, Resources: []string{"foos"}, Verbs: []string{"update"}, Namespaces: []string{"*"}}}, Bucket: &v1alpha1.Bucket{Burst: 10, Interval: "1s", Limit: 5}},
			}},
			Status: v1alpha1.CircuitBreakerStatus{Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonInForce, ""), TargetStatus: []v1alpha1.TargetStatus{
				{PodName: "od-0", LimitingSnapshots: []v1alpha1.LimitingSnapshot{{Name: "foos", State: state, LastTransitionTime: ago(4e9)}}},
			}},
		}
		change(b)
		c.Add(b)
	}
}

func asItIs(*v1alpha1.CircuitBreaker) {}

// injects adds a FaultInjection.
func injects(_ *testing.T, c *meshtest.Cluster) {
	c.Add(&v1alpha1.FaultInjection{
		ObjectMeta: metav1.ObjectMeta{Namespace: meshtest.Operator, Name: "conflicts", UID: "uid-of-conflicts", Generation: 1},
		Spec: v1alpha1.FaultInjectionSpec{Selector: &metav1.LabelSelector{}, HTTPFaultInjections: []v1alpha1.HTTPFaultInjection{{
			Name: "writes", Match: &v1alpha1.FaultMatch{Resources: []v1alpha1.FaultResourceMatch{{Resources: []string{"foos"}, Verbs: []string{"update"}}}},
			Abort: &v1alpha1.FaultAbort{HTTPStatus: 409, Percent: "5"}, Delay: &v1alpha1.FaultDelay{FixedDelay: "1s", Percent: "50"},
		}}},
	})
}

func TestExplain(t *testing.T) {
	spec := func(change func(*v1alpha1.ShardingConfigSpec)) func(*testing.T, *meshtest.Cluster) {
		return func(t *testing.T, c *meshtest.Cluster) { change(&root(t, c).Spec) }
	}
	const foreign, own = "explain od-1 update foos --object-namespace team-42", "explain od-0 update foos --object-namespace team-42"
	requireScenarios(t, []scenario{
		// Who decides.
		{name: "explain-foreign", plant: nothing, args: foreign, code: Found},
		{name: "explain-own", plant: nothing, args: own},
		{name: "explain-undivided", plant: nothing, args: "explain od-0 update cm a --object-namespace team-42", tables: true},
		{name: "explain-unlabelled", plant: unlabelled, args: foreign, tables: true},
		{name: "explain-observed", plant: observed, args: "explain seen-0 delete foos a", tables: true},
		{name: "explain-conflict", plant: conflicts, args: "explain bh-0 list pods", code: Found, tables: true},
		{name: "explain-damaged", plant: damaged, args: foreign, code: Found, tables: true},
		{name: "explain-passthrough", plant: passesThrough, args: "explain bh-0 get pods a", tables: true},
		{name: "explain-no-agent", plant: losesAgent, args: "explain od-1 list foos -A", code: Found, tables: true},
		{name: "explain-fails-open", plant: failsOpen, args: foreign, tables: true},
		{name: "explain-fails-open-by-iptables", plant: failsOpenByIPTables, args: foreign, code: Found, tables: true},
		{name: "explain-not-ready", plant: losesLeader, args: "explain od-1 list foos -A", tables: true},
		// Handovers.
		{name: "explain-standby", plant: waits, args: foreign, code: Found, tables: true},
		{name: "explain-releasing", plant: handsOver, args: "explain od-0 update foos a --object-namespace team-42", code: Found, tables: true},
		{name: "explain-between", plant: between, args: own, code: Found, tables: true},
		{name: "explain-granting", plant: grants, args: foreign, tables: true},
		{name: "explain-manager-down", plant: managerDown, args: foreign, code: Found, tables: true},
		// Reads.
		{name: "explain-list", plant: nothing, args: "explain od-0 list foos -A"},
		{name: "explain-watch-foreign", plant: nothing, args: "explain od-1 watch foos --object-namespace team-42", tables: true},
		{name: "explain-list-filter", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Root.Method = v1alpha1.MethodFilter }), args: "explain od-0 list foos -A", tables: true},
		{name: "explain-list-labels", plant: nothing, args: "explain bh-0 list cm -A", tables: true},
		{name: "explain-list-method-labels", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Root.Method = v1alpha1.MethodLabels }), args: "explain od-0 list foos -A", tables: true},
		{name: "explain-delete-all", plant: nothing, args: "explain od-1 deletecollection foos --object-namespace team-42", tables: true},
		{name: "explain-list-shared", plant: nothing, args: "explain od-0 list foos", tables: true},
		{name: "explain-get-foreign", plant: nothing, args: "explain od-1 get foos a --object-namespace team-42", tables: true},
		{name: "explain-get-reads-own", plant: readsOwn(nothing), args: "explain od-1 get foos a --object-namespace team-42", code: Found, tables: true},
		// Other rules of a configuration.
		{name: "explain-fence", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Fence = v1alpha1.FenceNamespace }), args: "explain od-1 create pods/exec a --object-namespace team-42", code: Found, tables: true},
		{name: "explain-fence-collection", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Fence = v1alpha1.FenceNamespace }), args: "explain od-1 deletecollection cm --object-namespace team-42", tables: true},
		{name: "explain-cluster-scoped", plant: subsets, args: "explain od-0 patch clusterroles a", code: Found, tables: true},
		{name: "explain-cluster-scoped-default", plant: subsets, args: "explain od-1 patch clusterroles a", tables: true},
		{name: "explain-user-agent", plant: subsets, args: "explain od-0 get foos a --user-agent reporter/1", code: Found, tables: true},
		{name: "explain-outside", plant: confined, args: foreign, code: Found, tables: true},
		{name: "explain-shared", plant: spec(func(s *v1alpha1.ShardingConfigSpec) {
			s.Root.Shared = []v1alpha1.SharedObjects{{APIGroups: []string{"example.com"}, Resources: []string{"foos"}, Namespaces: []string{"team-42"}, Names: []string{"common"}, Writes: v1alpha1.SharedWritesEveryone}}
		}), args: "explain od-1 update foos common --object-namespace team-42", tables: true},
		{name: "explain-isolation-off", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Isolation = v1alpha1.IsolationOff }), args: foreign, tables: true},
		{name: "explain-dry-run", plant: tries, args: "explain operator-demo-1 update foos --object-namespace team-42", tables: true},
		{name: "explain-observe", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Isolation = v1alpha1.IsolationObserve }), args: foreign, tables: true},
		{name: "explain-shadow", plant: shadows, args: "explain bh-0 update cm a", tables: true},
		{name: "explain-shadow-exec", plant: shadows, args: "explain bh-0 create pods/exec a", code: Found, tables: true},
		{name: "explain-cluster", plant: byCluster, args: "explain od-1 list foos -A --cluster member-2", code: Found, tables: true},
		{name: "explain-cluster-namespace", plant: spec(func(s *v1alpha1.ShardingConfigSpec) { s.Clusters = []v1alpha1.ClusterPath{{PathPrefix: "/clusters/*"}} }), args: foreign + " --cluster member-2", code: Found, tables: true},
		{name: "explain-object-own", plant: byUID, args: "explain od-0 update cm own --object-namespace team-42", tables: true},
		{name: "explain-object-foreign", plant: byUID, args: "explain od-0 delete cm foreign --object-namespace team-42", code: Found, tables: true},
		{name: "explain-object-get", plant: readsOwn(byUID), args: "explain od-0 get cm foreign --object-namespace team-42", code: Found, tables: true},
		{name: "explain-object-missing", plant: byUID, args: "explain od-0 delete cm none --object-namespace team-42", tables: true},
		{name: "explain-object-unnamed", plant: byUID, args: "explain od-0 delete cm --object-namespace team-42", code: Unknown, tables: true},
		// Locks.
		{name: "explain-lock", plant: nothing, args: "explain od-0 update leases operator-leader"},
		{name: "explain-lock-no-leader", plant: losesLeader, args: "explain od-1 get leases operator-leader", tables: true},
		{name: "explain-lock-standby", plant: waits, args: "explain od-0 get leases operator-leader", tables: true},
		{name: "explain-lock-held-outside", plant: waits, args: "explain od-0 update leases operator-leader", code: Found, tables: true},
		{name: "explain-lock-no-leases", plant: forbids(&coordinationv1.LeaseList{}, "leases"), args: "explain od-0 update leases operator-leader", tables: true},
		{name: "explain-lock-unknown", plant: nothing, args: "explain od-0 update leases another", tables: true},
		{name: "explain-lock-unnamed", plant: nothing, args: "explain od-0 get leases", tables: true},
		// Traffic.
		{name: "explain-limit-closed", plant: limits(v1alpha1.BreakerClosed, asItIs), args: own},
		{name: "explain-limit-opened", plant: limits(v1alpha1.BreakerOpened, asItIs), args: own, code: Found},
		{name: "explain-limit-half-open", plant: limits(v1alpha1.BreakerHalfOpen, asItIs), args: own, tables: true},
		{name: "explain-limit-manual", plant: limits(v1alpha1.BreakerOpened, func(b *v1alpha1.CircuitBreaker) {
			b.Spec.RateLimitings[1].RecoverPolicy = &v1alpha1.RecoverPolicy{Type: v1alpha1.RecoverManual}
		}), args: own, code: Found, tables: true},
		{name: "explain-limit-forced", plant: limits("", func(b *v1alpha1.CircuitBreaker) {
			b.Spec.RateLimitings[1].TriggerPolicy = v1alpha1.TriggerForceOpened
		}), args: own, code: Found, tables: true},
		{name: "explain-limit-off", plant: limits("", func(b *v1alpha1.CircuitBreaker) {
			b.Spec.RateLimitings[1].TriggerPolicy = v1alpha1.TriggerForceClosed
		}), args: own, tables: true},
		{name: "explain-limit-no-share", plant: limits(v1alpha1.BreakerClosed, func(b *v1alpha1.CircuitBreaker) {
			b.Spec.RateLimitings[1].Scope, b.Status.TargetStatus[0].LimitingSnapshots[0].Share = v1alpha1.LimitScopeWorkload, "-"
		}), args: own, code: Found, tables: true},
		{name: "explain-limit-user-agent", plant: limits(v1alpha1.BreakerClosed, func(b *v1alpha1.CircuitBreaker) {
			b.Spec.RateLimitings[1].UserAgents = []string{"reporter/*"}
		}), args: own, tables: true},
		{name: "explain-limit-other", plant: limits(v1alpha1.BreakerClosed, asItIs), args: "explain od-0 list foos -A", tables: true},
		{name: "explain-fault", plant: injects, args: own, code: Found},
		{name: "explain-fault-forbidden", plant: func(t *testing.T, c *meshtest.Cluster) {
			injects(t, c)
			meshtest.Find[*corev1.Namespace](t, c, "", "team-42").Labels = map[string]string{v1alpha1.NoFaultsLabel: "true"}
		}, args: own, tables: true},
		{name: "explain-fault-not-matched", plant: injects, args: "explain od-0 get foos a", tables: true},
		// All requests of a pod.
		{name: "explain-pod", plant: func(t *testing.T, c *meshtest.Cluster) {
			limits(v1alpha1.BreakerClosed, asItIs)(t, c)
			injects(t, c)
		}, args: "explain od-1"},
		{name: "explain-pod-standby", plant: waits, args: "explain od-0", tables: true},
		{name: "explain-pod-subsets", plant: subsets, args: "explain od-0", tables: true},
		{name: "explain-pod-dry-run", plant: tries, args: "explain operator-demo-1", tables: true},
		{name: "explain-pod-shadow", plant: shadows, args: "explain bh-0", tables: true},
		{name: "explain-pod-conflict", plant: conflicts, args: "explain bh-0", tables: true},
		{name: "explain-pod-passthrough", plant: passesThrough, args: "explain bh-0", tables: true},
		{name: "explain-pod-fails-open", plant: failsOpen, args: "explain od-1", tables: true},
		{name: "explain-pod-fails-open-by-iptables", plant: failsOpenByIPTables, args: "explain od-1", tables: true},
		{name: "explain-pod-observed", plant: observed, args: "explain seen-0", tables: true},
		{name: "explain-pod-unlabelled", plant: unlabelled, args: "explain od-1", tables: true},
		{name: "explain-pod-unknown", plant: nothing, args: "explain od-7", code: Unknown, tables: true},
		// What cannot be said.
		{name: "explain-no-resource-named", plant: nothing, args: "explain od-0 list", code: Unknown, tables: true},
		{name: "explain-no-pod", plant: nothing, args: "explain od-7 list foos", code: Unknown, tables: true},
		{name: "explain-no-resource", plant: nothing, args: "explain od-0 list fooz", code: Unknown, tables: true},
		{name: "explain-no-such-resource", plant: nothing, args: "explain od-0 list widgets.example.org", code: Unknown, tables: true},
		{name: "explain-in-no-namespace", plant: nothing, args: "explain od-0 list clusterroles --object-namespace a", code: Unknown, tables: true},
		{name: "explain-write-of-all", plant: nothing, args: "explain od-0 update foos a -A", code: Unknown, tables: true},
		{name: "explain-no-subresource", plant: nothing, args: "explain od-0 get foos/statsu a", code: Unknown, tables: true},
		{name: "explain-no-verb", plant: nothing, args: "explain od-0 apply foos", code: Unknown, tables: true},
		{name: "explain-no-namespaces", plant: func(t *testing.T, c *meshtest.Cluster) {
			confined(t, c)
			forbids(&corev1.NamespaceList{}, "namespaces")(t, c)
		}, args: foreign, code: Unknown, tables: true},
		{name: "explain-forbidden", plant: forbids(&v1alpha1.CircuitBreakerList{}, "circuitbreakers"), args: foreign, code: Unknown, tables: true},
		{name: "explain-unreachable", plant: unreachable, args: foreign, code: Unknown, tables: true},
	})
}

// The apiserver is asked as kubectl asks it.
func TestExplainFindsResourcesByTheirNames(t *testing.T) {
	for _, name := range []string{"foos", "foo", "Foo", "fo", "foos.example.com", "foo.v1.example.com", "foos/status", "foos/a"} {
		r := run(t, meshtest.Healthy(t), "", strings.Fields("explain od-0 get "+name+" -o json")...)
		require.Equal(t, Healthy, r.code, "%s", r)
		require.Contains(t, r.out, `"resource": "foos.example.com`)
	}
}
