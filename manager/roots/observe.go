package roots

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// outsidePage bounds the pods outside the mesh that are read at once.
const outsidePage = 250

// revisionEvery is how often the revision of a StatefulSet is read whose pods are rolled out.
const revisionEvery = 5 * time.Second

// lookups are what was read of a root's workload at its time, because it is read rarely.
type lookups struct {
	outside decide.Outside
	statefulSet
	previous
}

// statefulSet is what was read of a root's StatefulSet.
type statefulSet struct {
	read         time.Time
	firstOrdinal int // of its pods
	revision     decide.Revision
	allows       bool // the manager to restore its template
}

// Sources are what a leader knows besides the Input and the recorded state.
type Sources struct {
	// Observe returns what the agent of a node reported about a pod.
	Observe func(node, uid string) push.Observation
	// Locks is what is known of operators' locks.
	Locks locks.Reader
	// Since is when this manager became the leader.
	Since time.Time
	// Asked is that of the root's demand as it was published last.
	Asked uint64
}

// FactsOf returns the facts about a root that follow from an Input, the recorded state and what
// the leader knows. The others must be read from the apiserver.
func FactsOf(config *v1alpha1.ShardingConfig, w Input, stored decide.Stored, m decide.Memory, s Sources) decide.Facts {
	f := decide.Facts{Spec: specOf(config, w), Stored: stored, Pods: podsOf(config, w, stored.State.Members), Namespaces: w.Namespaces}
	f.Agents = decide.Agents{
		Observed: map[decide.PodKey]push.Observation{}, Policies: w.Compiled.Policies,
		Removed: w.Removed, Unconnected: w.Unconnected, Since: s.Since, RequestTimeout: w.RequestTimeout,
	}
	for key := range decide.Watched(m, f) {
		f.Agents.Observed[key] = s.Observe(key.Node, key.UID)
	}
	for _, shard := range w.Compiled.Shards {
		if shard.Root != nil && shard.Root.UID == config.UID {
			f.Shards = append(f.Shards, shard)
		}
	}
	f.Locks = survey(config, w, f, s)
	return f
}

// observe gathers what a decision depends on.
func (rt *runner) observe(ctx context.Context, config *v1alpha1.ShardingConfig, w Input, now time.Time) (decide.Facts, error) {
	f := FactsOf(config, w, rt.stored, rt.memory, Sources{Observe: rt.of.Observe, Locks: rt.of.Locks, Since: rt.of.since, Asked: rt.demand.Asked})
	f.Weights, f.Answers = rt.weights(), rt.of.Queries.Answers(rt.uid)
	if config.Spec.Root.Method == v1alpha1.MethodLabels {
		f.Stamping = rt.of.Others.Stamping(config)
	}
	f.MissingBundle = rt.of.Others.MissingBundle(config.Namespace)

	if err := rt.readStatefulSet(ctx, config, now); err != nil {
		return f, err
	}
	f.Spec.FirstOrdinal, f.Revision = rt.lookups.firstOrdinal, rt.lookups.revision
	rt.readPrevious(ctx, &f, now)
	rt.readOutside(ctx, &f, now)
	f.Locks.Holders = map[types.NamespacedName]string{}
	for _, lock := range decide.Unled(rt.memory, f, now) {
		f.Locks.Holders[lock] = HolderOf(ctx, rt.of.Client, lock.Namespace, lock.Name)
	}
	lease, err := locks.LongestLease(ctx, rt.of.Client, decide.Lingering(f, now))
	if err != nil {
		return f, err
	}
	f.Locks.Lease = lease
	if decide.NeedsScale(rt.memory, f, now) {
		replicas, err := readReplicas(ctx, rt.of.Client, config, f.Pods.Workload)
		f.Scale = &decide.Scale{Replicas: replicas, Err: err}
	}
	return f, nil
}

// specOf returns what is asked of a root.
func specOf(config *v1alpha1.ShardingConfig, w Input) decide.Spec {
	s := decide.Spec{Config: config, Asked: w.Enacted.Asked[config.UID], Change: w.Enacted.Changes[config.UID], Unknown: w.Unknown[config.UID]}
	if s.Problem = compile.Invalid(config); s.Problem == nil {
		s.Problem = w.Unresolved[config.UID]
	}
	for _, shard := range w.Compiled.Shards {
		if shard.Config == nil || origin.Of(shard.Config) != origin.Of(config) {
			continue
		}
		s.Conflicts, s.TooLarge = shard.Conflicts, shard.TooLarge
		if s.Problem == nil && shard.Problem != nil && shard.Config.Generation == config.Generation {
			s.Problem = errors.New(shard.Problem.Message)
		}
	}
	return s
}

// podsOf returns the pods of a root.
func podsOf(config *v1alpha1.ShardingConfig, w Input, members map[string]handover.Member) decide.Pods {
	out := decide.Pods{ByUID: map[string]*corev1.Pod{}, NodesGone: map[string]bool{}}
	selects := layout.Selects(config.Spec.Root)
	for _, p := range w.Pods {
		if p.Namespace != config.Namespace {
			continue
		}
		out.ByUID[string(p.UID)] = p
		if compile.Labelled(p) && !compile.Ended(p) && selects(p) {
			out.Workload = append(out.Workload, p)
		}
	}
	for uid, m := range members {
		if out.ByUID[uid] == nil && !w.Node(m.Node) {
			out.NodesGone[m.Node] = true
		}
	}
	return out
}

func (rt *runner) weights() decide.Weights {
	w := rt.of.Weigher
	out := decide.Weights{Current: w.Current(rt.uid), Problem: w.Problem(rt.uid)}
	if out.Of, out.Counted = w.First(rt.uid); !out.Counted {
		out.Of = w.Weights(rt.uid)
	}
	return out
}

// survey returns what is known of the operator's locks.
func survey(config *v1alpha1.ShardingConfig, w Input, f decide.Facts, s Sources) decide.Locks {
	observe := func(node, uid string) push.Observation { return f.Agents.Observed[decide.PodKey{Node: node, UID: uid}] }
	out := decide.Locks{States: map[types.NamespacedName]locks.State{}, Claimed: map[types.NamespacedName]bool{}, Forbidden: w.ForbiddenLocks[config.UID], Asked: s.Asked}
	out.Surveyed, out.Undiscovered = locks.Survey(config, f.Stored.Status.Locks, locks.Sightings(f.Pods.Workload, observe), w.Configs, s.Locks)
	state := s.Locks.States(client.ObjectKeyFromObject(config))
	for _, l := range out.Surveyed {
		name := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
		if known, ok := state(name); ok {
			out.States[name] = known
		}
		out.Claimed[name] = locks.Claimed(config, name, w.Configs, s.Locks) != ""
	}
	return out
}

// readOutside lists the pods of the workload outside the mesh, where they matter and were not
// just listed.
func (rt *runner) readOutside(ctx context.Context, f *decide.Facts, now time.Time) {
	known := &rt.lookups.outside
	if origin.KindOf(f.Spec.Config) == origin.VirtualApp {
		known.Entry = rt.of.Others.Entry(f.Spec.Config)
	}
	if f.Outside = *known; decide.ListOutside(*f, now) {
		if known.Pods, known.Act, known.Err = findOutside(ctx, rt.of.Client, f.Spec.Config, now); known.Err == nil {
			known.Listed = now
		}
	}
	f.Outside = *known
}

// runningFor is how long a pod outside the mesh must exist for shards to make way for it: that of a Job,
// or of a debugger, may have the labels of the operator.
const runningFor = 30 * time.Second

// findOutside lists the pods of the workload that do not have the label of the mesh, and reports whether
// one of them runs, and has for a while. The manager does not watch those.
func findOutside(ctx context.Context, c client.Reader, config *v1alpha1.ShardingConfig, now time.Time) (out []string, act bool, err error) {
	unlabelled, err := labels.NewRequirement(v1alpha1.EnableProxyLabel, selection.NotEquals, []string{"true"})
	if err != nil {
		return nil, false, err
	}
	selector := labels.NewSelector().Add(*unlabelled)
	if s := config.Spec.Root.TargetSelector; s != nil {
		target, err := metav1.LabelSelectorAsSelector(s)
		if err != nil {
			return nil, false, fmt.Errorf("reading the selector: %w", err)
		}
		more, _ := target.Requirements()
		selector = selector.Add(more...)
	}
	selects := layout.Selects(config.Spec.Root)
	var more []string
	for next := ""; ; {
		var page corev1.PodList
		if err := c.List(ctx, &page, client.InNamespace(config.Namespace), client.MatchingLabelsSelector{Selector: selector}, client.Limit(outsidePage), client.Continue(next)); err != nil {
			return nil, false, fmt.Errorf("listing pods: %w", err)
		}
		for i := range page.Items {
			pod := &page.Items[i]
			if !selects(pod) || compile.Ended(pod) {
				continue
			}
			act = act || pod.Status.Phase == corev1.PodRunning && now.Sub(pod.CreationTimestamp.Time) >= runningFor
			if len(out) == decide.MaxNamed {
				more = []string{"and more"}
				continue
			}
			out = append(out, pod.Name)
		}
		if next = page.Continue; next == "" || act && more != nil {
			return append(out, more...), act, nil
		}
	}
}

// readStatefulSet reads now and then what is known of the StatefulSet of a root.
func (rt *runner) readStatefulSet(ctx context.Context, config *v1alpha1.ShardingConfig, now time.Time) error {
	known, every := &rt.lookups.statefulSet, decide.OutsideRarely
	if config.Spec.Root.Rollout != nil {
		every = revisionEvery
	}
	target := layout.Target(config.Spec.Root)
	if target.Kind != layout.StatefulSet || now.Sub(known.read) < every {
		return nil
	}
	set := &appsv1.StatefulSet{}
	err := rt.of.Client.Get(ctx, client.ObjectKey{Namespace: config.Namespace, Name: target.Name}, set)
	switch {
	case apierrors.IsNotFound(err):
		*known = statefulSet{read: now, revision: decide.Revision{Problem: target.String() + " does not exist"}}
		return nil
	case err != nil && !known.read.IsZero():
		return nil // it rarely changes
	case err != nil:
		return fmt.Errorf("reading %s: %w", target, err)
	}
	*known = statefulSet{read: now, revision: revisionOf(set), allows: set.Annotations[v1alpha1.AllowRollbackAnnotation] == "true"}
	known.revision.Read = now
	if set.Spec.Ordinals != nil {
		known.firstOrdinal = int(set.Spec.Ordinals.Start)
	}
	return nil
}

func revisionOf(set *appsv1.StatefulSet) (r decide.Revision) {
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteStatefulSetStrategyType {
		// A partition does not help: the pods below it keep their revision even if they are deleted.
		r.Problem = fmt.Sprintf("StatefulSet %[2]s has updateStrategy RollingUpdate: whatever its partition, its pods with the highest ordinals get a revision first, and the canary has the lowest; set OnDelete: "+
			`kubectl -n %[1]s patch statefulset %[2]s --type=merge -p '{"spec":{"updateStrategy":{"type":"OnDelete","rollingUpdate":null}}}'`, set.Namespace, set.Name)
	}
	// Of the last template that its controller has seen.
	r.Update, r.Generation = set.Status.UpdateRevision, set.Status.ObservedGeneration
	return r
}

// readReplicas returns the desired number of pods of all workloads of a root; workloads that do
// not exist count as 0. If the root selects its pods by label, its workloads are those of the
// pods that exist: the successor of a workload's only pod is then not waited for.
func readReplicas(ctx context.Context, c client.Client, config *v1alpha1.ShardingConfig, pods []*corev1.Pod) (n int, err error) {
	workloads := map[layout.Workload]bool{}
	if target := layout.Target(config.Spec.Root); target.Name != "" {
		workloads[target] = true
	} else {
		for _, p := range pods {
			if w, ok := layout.WorkloadOf(p); ok {
				workloads[w] = true
			}
		}
	}
	for w := range workloads {
		meta := metav1.ObjectMeta{Namespace: config.Namespace, Name: w.Name}
		var workload client.Object = &appsv1.StatefulSet{ObjectMeta: meta}
		if w.Kind != layout.StatefulSet {
			workload = &appsv1.Deployment{ObjectMeta: meta}
		}
		scale := &autoscalingv1.Scale{}
		err := c.SubResource("scale").Get(ctx, workload, scale)
		if client.IgnoreNotFound(err) != nil {
			return 0, fmt.Errorf("reading the scale of %s: %w", w, err)
		}
		n += int(scale.Spec.Replicas)
	}
	return n, nil
}

// HolderOf reads the holder of a Lease; empty if it has none, or cannot be read.
func HolderOf(ctx context.Context, c client.Reader, namespace, name string) string {
	lease := &coordinationv1.Lease{}
	if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, lease); err != nil {
		return ""
	}
	return ptr.Deref(lease.Spec.HolderIdentity, "")
}
