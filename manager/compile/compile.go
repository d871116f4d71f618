// Package compile renders the objects that users wrote into the policies that
// agents apply: one PodPolicy per labelled pod.
//
// It is pure: no I/O, no goroutine, no clock. The same configurations and pods
// give the same policies, independent of their order.
package compile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// Policy is the policy of one pod, and the node whose agent applies it.
type Policy struct {
	// Node is empty while the pod is not scheduled.
	Node string
	*meshv1.PodPolicy
}

// Root is the recorded state of a configuration. It must have been written to the API
// before it is compiled, because agents must not receive unrecorded state. Configurations
// without spec.root have only Locks and Standby.
type Root struct {
	State handover.State
	// Namespaces are those that exist, for method Labels.
	Namespaces []string
	// Locks are the operator's locks, as status.locks lists them.
	Locks []v1alpha1.LockStatus
	// FirstOrdinal is the first ordinal of the pods of a StatefulSet, spec.ordinals.start.
	FirstOrdinal int
	// Acting is what the shards act by; nil if that is not on record.
	Acting *v1alpha1.ActingSpec
	// Lost are pods without a shard that were deleted or exited according to the API, but
	// may still run. All their requests are refused.
	Lost []handover.Member
	// Forgotten are the members, by uid, that their agents have no record of. All their
	// requests are refused until they are no longer members.
	Forgotten map[string]bool
	// Undivided reports whether the spec names resources that do not exist. Pods in standby
	// write to no namespace but their own then, because what they may not write is unknown.
	Undivided bool
	// Standby is the reason why all members are in standby; empty if they are not.
	Standby string
}

// Shard is the result of compiling one configuration.
type Shard struct {
	types.NamespacedName
	// Config is nil for a derived shard whose object does not exist yet.
	Config *v1alpha1.ShardingConfig
	// Root is the root that a derived shard was derived from; nil for other shards.
	Root *v1alpha1.ShardingConfig
	// Owned is the scope that a derived shard owns.
	Owned sharding.Scope
	// Members are its pods, sorted by name. The members of a root are all pods of its
	// workload.
	Members []*corev1.Pod
	// Lock is the upstream name of its first lock; empty without leader election.
	Lock string
	// Locks are the operator's locks under the shard's names.
	Locks []*meshv1.Lock
	// Problem explains to the user why the configuration has no effect; nil if it has.
	Problem *Problem
	// Conflicts are the members that another configuration selects too.
	Conflicts []Conflict
	// TooLarge are the names of members that are refused because their policies exceed
	// the size that an agent accepts.
	TooLarge []string
}

// Problem is an error in a configuration that only its author can fix.
type Problem struct {
	// Reason is a condition's reason.
	Reason  v1alpha1.Reason
	Message string
}

func (p *Problem) Error() string { return p.Message }

// Conflict is a pod that several configurations select.
type Conflict struct {
	Pod string
	// Configs are the names of all configurations that select the pod, sorted.
	Configs []string
}

// Result is the outcome of Compile.
type Result struct {
	// Policies are by pod uid.
	Policies map[types.UID]Policy
	// Shards, Breakers and Injections are sorted by namespace and name.
	Shards     []Shard
	Breakers   []Breaker
	Injections []Injection
	// Took is how long each configuration took to compile, with its pods. Those that were
	// derived are left out.
	Took map[types.NamespacedName]time.Duration
	// Until is the time from which the next FaultInjection to expire is omitted; zero if
	// none expires.
	Until time.Time
}

// source is a configuration that pods belong to: one written by hand, or a root.
type source struct {
	*Shard
	clusters []v1alpha1.ClusterPath
	selects  func(metav1.Object) bool
	// fill completes the policy of a member.
	fill func(*corev1.Pod, *meshv1.PodPolicy)
	// serial returns the serial of a pod's shard, 0 for a pod without a shard. It is nil if
	// the shards of the source have no serials.
	serial func(*corev1.Pod) uint64
}

// Compile assigns pods to configurations and renders the policy of each pod.
// Pods without the label and pods that have exited get no policy, except those that
// are recorded in a root's State: they are refused until they are removed from it.
//
// The pods of a root that is missing in roots are refused, because it is unknown which
// shard owns which keys. A root that is being deleted is treated as disabled. Pods of a
// root that wait for a shard, or whose shard was withdrawn, are in standby.
func Compile(configs []*v1alpha1.ShardingConfig, pods []*corev1.Pod, roots map[origin.Name]Root, rules Rules) Result {
	c := &compilation{
		Result: Result{Policies: make(map[types.UID]Policy, len(pods)), Took: map[types.NamespacedName]time.Duration{}}, pods: slices.SortedFunc(slices.Values(pods), byName), roots: roots,
		requestTimeout: rules.RequestTimeout, versions: versioner{}, sources: map[string][]source{}, rootOf: map[types.NamespacedName]*root{}, tooLarge: map[types.UID]bool{},
		elapsed: rules.Elapsed, cache: cmp.Or(rules.Cache, &Cache{}), read: map[origin.Name]objectLimits{},
	}
	c.readConfigs(configs)
	traffic := newTrafficRules(rules)
	c.renderPods(traffic)
	c.listShards()
	c.cache.limits = c.read
	traffic.result(&c.Result)
	return c.Result
}

// compilation is one call of Compile.
type compilation struct {
	Result
	pods           []*corev1.Pod // sorted
	roots          map[origin.Name]Root
	requestTimeout time.Duration
	versions       versioner
	shards         []*Shard
	sources        map[string][]source            // by namespace
	rootOf         map[types.NamespacedName]*root // by shard
	tooLarge       map[types.UID]bool
	elapsed        func() time.Duration // nil: unknown
	cache          *Cache
	read           map[origin.Name]objectLimits // for the cache
}

// measure adds what do takes to the configuration that it returns, unless that is nil.
func (c *compilation) measure(do func() *v1alpha1.ShardingConfig) {
	if c.elapsed == nil {
		do()
		return
	}
	began := c.elapsed()
	if config := do(); config != nil {
		c.Took[nameOf(config)] += c.elapsed() - began
	}
}

// readConfigs converts configurations to sources and shards.
func (c *compilation) readConfigs(configs []*v1alpha1.ShardingConfig) {
	objects := make(map[types.NamespacedName]*v1alpha1.ShardingConfig, len(configs))
	for _, config := range configs {
		if origin.IsNative(config) {
			objects[nameOf(config)] = config
		}
	}
	derived := map[types.NamespacedName]bool{}
	read := func(late bool) {
		for _, config := range slices.SortedFunc(slices.Values(configs), byName) {
			if !Derived(config) && late == (shadowed(config) != "") {
				c.measure(func() *v1alpha1.ShardingConfig {
					c.readConfig(config, objects, derived)
					return config
				})
			}
		}
	}
	read(false)
	read(true) // shadows of shards that are now known
	for name, config := range objects {
		if Derived(config) && !derived[name] {
			c.shards = append(c.shards, &Shard{NamespacedName: name, Config: config, Problem: &Problem{v1alpha1.ReasonInvalid,
				fmt.Sprintf("label %s says that it was derived from ShardingConfig %s, which has no such shard, so that it has no effect: delete it", v1alpha1.RootLabel, config.Labels[v1alpha1.RootLabel])}})
		}
	}
}

// readConfig converts a configuration to a source and its shards. It adds the names of the shards
// that are derived from it to derived.
func (c *compilation) readConfig(config *v1alpha1.ShardingConfig, objects map[types.NamespacedName]*v1alpha1.ShardingConfig, derived map[types.NamespacedName]bool) {
	s := source{Shard: &Shard{NamespacedName: nameOf(config), Config: config}, clusters: config.Spec.Clusters}
	switch of := shadowed(config); {
	case config.Spec.Root == nil && of == "":
		sharding, problem := render(config, c.roots[origin.Of(config)], c.limits(config))
		s.written(sharding, problem, c.requestTimeout)
	case config.Spec.Root == nil:
		r := c.rootOf[types.NamespacedName{Namespace: config.Namespace, Name: of}]
		sharding, problem := r.shadow(config)
		s.written(sharding, problem, c.requestTimeout)
		if r != nil {
			s.clusters = r.config.Spec.Clusters
		}
	default:
		for _, d := range c.readRoot(&s, objects) {
			derived[d.NamespacedName] = true
			c.shards = append(c.shards, d)
		}
	}
	c.shards = append(c.shards, s.Shard)
	c.sources[config.Namespace] = append(c.sources[config.Namespace], s)
}

// readRoot converts a root to a source and returns the shards derived from it.
func (c *compilation) readRoot(s *source, objects map[types.NamespacedName]*v1alpha1.ShardingConfig) map[string]*Shard {
	known, ok := c.roots[origin.Of(s.Config)]
	r := newRoot(s.Shard, known, ok, objects, c.limits(s.Config))
	r.requestTimeout = c.requestTimeout
	if s.Config.Spec.DryRun && s.Problem == nil && !Withdrawn(s.Config) {
		r.dryRun = planDryRun(r, c.pods)
	}
	s.selects, s.fill, s.serial = r.selects, r.fill, r.serial
	for _, d := range r.derived {
		c.rootOf[d.NamespacedName] = r
	}
	r.refuseLost(c.pods, c.versions, c.Policies)
	return r.derived
}

// renderPods renders the policies of all pods.
func (c *compilation) renderPods(traffic *trafficRules) {
	sizes := sizer{}
	for _, pod := range c.pods {
		if Labelled(pod) && !Ended(pod) {
			c.measure(func() *v1alpha1.ShardingConfig { return c.renderPod(pod, traffic, sizes) })
		}
	}
}

// renderPod renders the policy of a pod, and returns the first configuration that selects it.
func (c *compilation) renderPod(pod *corev1.Pod, traffic *trafficRules, sizes sizer) (by *v1alpha1.ShardingConfig) {
	p, by := policy(pod, c.sources[pod.Namespace])
	targets, digest := traffic.fill(pod, p)
	if sizes.exceeded(p) {
		refuseTooLarge(p)
		c.tooLarge[pod.UID] = true
		digest = nil
	}
	versioned := c.versions.finish(pod.Spec.NodeName, p, digest)
	c.Policies[pod.UID] = versioned
	for _, t := range targets {
		t.Version = versioned.Version
	}
	return by
}

// listShards sorts the shards into the result. It runs after renderPods, which adds
// their members.
func (c *compilation) listShards() {
	slices.SortFunc(c.shards, func(a, b *Shard) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	c.Shards = make([]Shard, len(c.shards))
	for i, s := range c.shards {
		for _, m := range s.Members {
			if c.tooLarge[m.UID] {
				s.TooLarge = append(s.TooLarge, m.Name)
			}
		}
		c.Shards[i] = *s
	}
}

// policy returns the policy of a pod, and adds the pod to the members of each source
// that selects it. It returns the first of these.
func policy(pod *corev1.Pod, sources []source) (p *meshv1.PodPolicy, by *v1alpha1.ShardingConfig) {
	p = &meshv1.PodPolicy{
		Uid:       string(pod.UID),
		Namespace: pod.Namespace,
		Name:      pod.Name,
		Workload:  Workload(pod),
	}
	var selecting []source
	var names []string
	for _, s := range sources {
		if s.selects != nil && s.selects(pod) {
			s.Members = append(s.Members, pod)
			selecting, names = append(selecting, s), append(names, origin.Among(s.Config))
		}
	}
	switch {
	case len(selecting) == 0 && pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh:
		// The pod was admitted as a member and would now run unsharded. Its
		// configuration was deleted, or is not in the cache yet.
		p.Refuse = fmt.Sprintf("pod %s/%s was admitted as a member of a shard, and no ShardingConfig selects it: create one that does, or delete the pod so that it is admitted anew", pod.Namespace, pod.Name)
	case len(selecting) == 0:
		p.FailOpen = CanFailOpen(pod)
		p.AnyToken = true // no configuration could require token binding
	case len(selecting) > 1:
		for _, s := range selecting {
			s.Conflicts = append(s.Conflicts, Conflict{Pod: pod.Name, Configs: names})
		}
		p.Refuse = ConflictMessage(pod.Namespace, names)
	case selecting[0].Problem != nil:
		p.Refuse = fmt.Sprintf("%s: %s", origin.Of(selecting[0].Config), selecting[0].Problem.Message)
	default:
		s := selecting[0]
		p.ClusterPaths = collect.Map(s.clusters, func(c v1alpha1.ClusterPath) string { return c.PathPrefix })
		if s.fill(pod, p); p.Refuse == "" {
			p.AnyToken = s.Config.Spec.TokenBinding == v1alpha1.TokenBindingOff
			// Without its agent, a pod in standby would act on all objects.
			p.FailOpen = CanFailOpen(pod) && s.Config.Spec.FailurePolicy == v1alpha1.FailOpen && !p.GetSharding().GetStandby()
		}
	}
	if p.Refuse != "" {
		p.Serial = refusedSerial(pod, selecting)
	}
	if len(selecting) > 0 {
		by = selecting[0].Config
	}
	return p, by
}

// refusedSerial returns the serial of a pod's refusal. It is the serial of the pod's
// shard, so that a handover does not wait for the pod. It is 0 if the pod has no shard,
// because then nothing waits for the pod.
func refusedSerial(pod *corev1.Pod, selecting []source) (serial uint64) {
	for _, s := range selecting {
		if s.serial != nil {
			serial = max(serial, s.serial(pod))
		}
	}
	return serial
}

// written fills in the source of a hand-written configuration, with the sharding of its members, or why
// there is none.
func (s *source) written(sharding *meshv1.Sharding, problem *Problem, requestTimeout time.Duration) {
	c := s.Config
	s.selects, s.Problem = Selects(c)
	if problem := origin.Problem(c); problem != "" {
		s.Problem = &Problem{v1alpha1.ReasonInvalid, problem}
	}
	if s.Problem != nil {
		return
	}
	s.Problem = problem
	if sharding != nil {
		sharding.RequestTimeoutSeconds = seconds(requestTimeout)
	}
	if !sharding.GetStandby() {
		s.Lock, s.Locks = firstLock(sharding.GetLocks()), sharding.GetLocks()
	}
	s.fill = func(pod *corev1.Pod, p *meshv1.PodPolicy) {
		p.Sharding = sharding
		p.Passthrough = CanPassThrough(pod) && PassesThrough(c)
		if Shadows(c) && !Exclusive(pod) { // without the configuration, its writes take effect
			p.Refuse = fmt.Sprintf("pod %s/%s was admitted before its ShardingConfig, or trusts the apiserver's CA as well, so that its writes could take effect: delete the pod so that it is admitted anew", pod.Namespace, pod.Name)
		}
	}
}

func seconds(d time.Duration) uint32 { return uint32(d / time.Second) }

func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func byName[T metav1.Object](a, b T) int {
	return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
}
