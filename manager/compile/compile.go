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
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// Policy is what one pod is held to, and the node whose agent must know.
type Policy struct {
	// Node is empty while the pod is not scheduled.
	Node string
	*meshv1.PodPolicy
}

// Root is what is known of a configuration, as it is written: nobody may be told of
// what is not. Of those without spec.root it is Locks and Standby alone.
type Root struct {
	State handover.State
	// Namespaces are those that exist, for method Labels.
	Namespaces []string
	// Locks are the operator's locks, as status.locks lists them.
	Locks []v1alpha1.LockStatus
	// Lost are pods without a shard that were deleted or have ended, and may run on: they
	// are refused.
	Lost []handover.Member
	// Forgotten are the members, by uid, that their agents know nothing of. They are
	// refused until they are members no more.
	Forgotten map[string]bool
	// Standby is why all members are in standby; empty if they are not.
	Standby string
}

// Shard is what became of one configuration.
type Shard struct {
	types.NamespacedName
	// Config is nil for a derived shard whose object does not exist yet.
	Config *v1alpha1.ShardingConfig
	// Root is what a derived shard was derived from; nil for others.
	Root *v1alpha1.ShardingConfig
	// Held is what a derived shard holds.
	Held sharding.Scope
	// Members are its pods, by name; of a root, all of its workload.
	Members []*corev1.Pod
	// Lock is the upstream name of its first lock, empty without leader election.
	Lock string
	// Locks are the operator's locks under the shard's names.
	Locks []*meshv1.Lock
	// Problem says why the configuration has no effect, for people.
	Problem *Problem
	// Conflicts are the members that another configuration selects too.
	Conflicts []Conflict
	// TooLarge are the names of members that are refused because their policy exceeds
	// what an agent receives.
	TooLarge []string
}

// Problem is something about a configuration that only its author can mend.
type Problem struct {
	// Reason is a condition's reason.
	Reason  v1alpha1.Reason
	Message string
}

func (p *Problem) Error() string { return p.Message }

// Conflict is a pod that several configurations select.
type Conflict struct {
	Pod string
	// Configs are all that select it, sorted.
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
	// Until is when the next FaultInjection that expires is left out; zero if none is.
	Until time.Time
}

// source is a configuration that pods belong to: one written by hand, or a root.
type source struct {
	*Shard
	selects func(metav1.Object) bool
	// judge fills in the policy of a member.
	judge func(*corev1.Pod, *meshv1.PodPolicy)
	// serial is that of a pod's shard, 0 for a pod without one; nil if shards have none.
	serial func(*corev1.Pod) uint64
}

// Compile assigns pods to configurations and renders the policy of each pod.
// Pods without the label and pods that have ended are left out, but for those
// that a root's State tells of: they are refused until it forgets them.
//
// The pods of a root that is not among roots are refused: who owns what is not
// known. One that is being deleted is as one that is disabled. Pods of a root that
// wait for a shard, or that were withdrawn from theirs, are in standby.
func Compile(configs []*v1alpha1.ShardingConfig, pods []*corev1.Pod, roots map[types.NamespacedName]Root, rules Rules) Result {
	c := &compilation{
		Result: Result{Policies: make(map[types.UID]Policy, len(pods))}, pods: slices.SortedFunc(slices.Values(pods), byName), roots: roots,
		requestTimeout: rules.RequestTimeout, seals: newSealer(), sources: map[string][]source{}, tooLarge: map[types.UID]bool{},
	}
	c.readConfigs(configs)
	traffic := newTrafficRules(rules)
	c.judgePods(traffic)
	c.listShards()
	traffic.result(&c.Result)
	return c.Result
}

// compilation is one call of Compile.
type compilation struct {
	Result
	pods           []*corev1.Pod // sorted
	roots          map[types.NamespacedName]Root
	requestTimeout time.Duration
	seals          sealer
	shards         []*Shard
	sources        map[string][]source // by namespace
	tooLarge       map[types.UID]bool
}

// readConfigs makes sources and shards of configurations.
func (c *compilation) readConfigs(configs []*v1alpha1.ShardingConfig) {
	objects := make(map[types.NamespacedName]*v1alpha1.ShardingConfig, len(configs))
	for _, config := range configs {
		objects[nameOf(config)] = config
	}
	derived := map[types.NamespacedName]bool{}
	for _, config := range slices.SortedFunc(slices.Values(configs), byName) {
		if Derived(config) {
			continue
		}
		s := source{Shard: &Shard{NamespacedName: nameOf(config), Config: config}}
		if config.Spec.Root == nil {
			s.written(c.roots[s.NamespacedName], c.requestTimeout)
		} else {
			for _, d := range c.readRoot(&s, objects) {
				derived[d.NamespacedName] = true
				c.shards = append(c.shards, d)
			}
		}
		c.shards = append(c.shards, s.Shard)
		c.sources[config.Namespace] = append(c.sources[config.Namespace], s)
	}
	for name, config := range objects {
		if Derived(config) && !derived[name] {
			c.shards = append(c.shards, &Shard{NamespacedName: name, Config: config, Problem: &Problem{v1alpha1.ReasonInvalid,
				fmt.Sprintf("label %s says that it was derived from ShardingConfig %s, which has no such shard, so that it has no effect: delete it", v1alpha1.RootLabel, config.Labels[v1alpha1.RootLabel])}})
		}
	}
}

// readRoot makes a source of a root and returns the shards derived from it.
func (c *compilation) readRoot(s *source, objects map[types.NamespacedName]*v1alpha1.ShardingConfig) map[string]*Shard {
	known, ok := c.roots[s.NamespacedName]
	r := newRoot(s.Shard, known, ok, objects)
	r.requestTimeout = c.requestTimeout
	if s.Config.Spec.DryRun && s.Problem == nil && !Withdrawn(s.Config) {
		r.dryRun = planDryRun(r, c.pods)
	}
	s.selects, s.judge, s.serial = r.selects, r.judge, r.serial
	r.refuseLost(c.pods, c.seals, c.Policies)
	return r.derived
}

// judgePods makes the policies of pods.
func (c *compilation) judgePods(traffic *trafficRules) {
	sizes := sizer{}
	for _, pod := range c.pods {
		if !Labelled(pod) || Ended(pod) {
			continue
		}
		p := policy(pod, c.sources[pod.Namespace])
		targets, digest := traffic.judge(pod, p)
		if sizes.exceeded(p) {
			refuseTooLarge(p)
			c.tooLarge[pod.UID] = true
			digest = nil
		}
		sealed := c.seals.seal(pod.Spec.NodeName, p, digest)
		c.Policies[pod.UID] = sealed
		for _, t := range targets {
			t.Version = sealed.Version
		}
	}
}

// listShards sorts the shards, whose members are known now.
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

// policy of a pod, which becomes a member of what selects it.
func policy(pod *corev1.Pod, sources []source) *meshv1.PodPolicy {
	p := &meshv1.PodPolicy{
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
			selecting, names = append(selecting, s), append(names, s.Name)
		}
	}
	switch {
	case len(selecting) == 0 && pod.Annotations[v1alpha1.TrustAnnotation] == v1alpha1.TrustMesh:
		// It was admitted as a member, and would run unsharded now: its
		// configuration was deleted, or is not known here yet.
		p.Refuse = fmt.Sprintf("pod %s/%s was admitted as a member of a shard, and no ShardingConfig selects it: create one that does, or delete the pod so that it is admitted anew", pod.Namespace, pod.Name)
	case len(selecting) == 0:
		p.FailOpen = CanFailOpen(pod)
		p.AnyToken = true // there is nothing in which to ask for it
	case len(selecting) > 1:
		for _, s := range selecting {
			s.Conflicts = append(s.Conflicts, Conflict{Pod: pod.Name, Configs: names})
		}
		p.Refuse = ConflictMessage(pod.Namespace, names)
	case selecting[0].Problem != nil:
		p.Refuse = fmt.Sprintf("ShardingConfig %s: %s", selecting[0].NamespacedName, selecting[0].Problem.Message)
	default:
		s := selecting[0]
		if s.judge(pod, p); p.Refuse == "" {
			p.AnyToken = s.Config.Spec.TokenBinding == v1alpha1.TokenBindingOff
			// A pod in standby would act on everything while its agent is away.
			p.FailOpen = CanFailOpen(pod) && s.Config.Spec.FailurePolicy == v1alpha1.FailOpen && !p.GetSharding().GetStandby()
		}
	}
	if p.Refuse != "" {
		p.Serial = refusedSerial(pod, selecting)
	}
	return p
}

// refusedSerial is the serial of a pod's refusal: that of its shard, so that the shard does
// not wait for the pod. 0 if the pod has no shard: nothing waits for it to have a serial.
func refusedSerial(pod *corev1.Pod, selecting []source) (serial uint64) {
	for _, s := range selecting {
		if s.serial != nil {
			serial = max(serial, s.serial(pod))
		}
	}
	return serial
}

// written makes a source of a configuration that names its shard's pods itself.
func (s *source) written(known Root, requestTimeout time.Duration) {
	c := s.Config
	if s.selects, s.Problem = Selects(c); s.Problem != nil {
		return
	}
	sharding, problem := render(c, known)
	s.Problem = problem
	if sharding != nil {
		sharding.RequestTimeoutSeconds = seconds(requestTimeout)
	}
	if !sharding.GetStandby() {
		s.Lock, s.Locks = firstLock(sharding.GetLocks()), sharding.GetLocks()
	}
	s.judge = func(pod *corev1.Pod, p *meshv1.PodPolicy) {
		p.Sharding = sharding
		p.Passthrough = CanPassThrough(pod) && PassesThrough(c)
	}
}

func seconds(d time.Duration) uint32 { return uint32(d / time.Second) }

func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func byName[T metav1.Object](a, b T) int {
	if c := strings.Compare(a.GetNamespace(), b.GetNamespace()); c != 0 {
		return c
	}
	return strings.Compare(a.GetName(), b.GetName())
}
