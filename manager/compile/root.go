package compile

import (
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/invalid"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

// root renders the policies of a root's pods.
type root struct {
	Root
	known   bool
	problem *Problem
	config  *v1alpha1.ShardingConfig
	// chooses reports whether the spec selects a pod.
	chooses func(metav1.Object) bool
	// derived are its shards, by name.
	derived  map[string]*Shard
	limits   objectLimits // of all shards
	owners   []*meshv1.Owner
	rendered map[sharedKey]*meshv1.Sharding // rendered before
	// waiting are the shardings of pods in standby, by reason.
	waiting map[string]*meshv1.Sharding
	dryRun  *dryRun // nil: none
	// requestTimeout is the apiserver's --request-timeout.
	requestTimeout time.Duration
}

// sharedKey is what a member's sharding depends on: members with equal values share one.
type sharedKey struct {
	shard string
	stale bool
}

// newRoot prepares to render a root. It stores the root's problem, if any, in own.
func newRoot(own *Shard, r Root, known bool, objects map[types.NamespacedName]*v1alpha1.ShardingConfig, read objectLimits) *root {
	c := own.Config
	out := &root{
		Root: r, known: known, config: c, chooses: layout.Selects(c.Spec.Root), derived: map[string]*Shard{}, owners: ownersOf(ownedBy(r.State)),
		rendered: map[sharedKey]*meshv1.Sharding{}, waiting: map[string]*meshv1.Sharding{},
	}
	if err := Invalid(c); err != nil {
		own.Problem = &Problem{v1alpha1.ReasonInvalid, err.Error()}
	} else if own.Problem = read.confine(c); own.Problem == nil {
		out.limits = read
	}
	out.problem = own.Problem
	for name, s := range r.State.Shards {
		d := &Shard{NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: name}, Root: c, Owned: s.Owned}
		if o := objects[d.NamespacedName]; o != nil && derivedFrom(o, c) {
			d.Config = o
		}
		d.Locks = shardLocks(renamedLocks(c, r.Locks), name)
		d.Lock = firstLock(d.Locks)
		out.derived[name] = d
	}
	return out
}

// Invalid returns why a root cannot be divided; nil if it can.
func Invalid(root *v1alpha1.ShardingConfig) error {
	if problem := origin.Problem(root); problem != "" {
		return errors.New(problem)
	}
	errs := layout.Validate(root.Spec.Root, field.NewPath("spec", "root"))
	if len(errs) == 0 {
		return nil
	}
	return errors.New(invalid.Message(errs))
}

// derivedFrom reports whether a configuration was derived from a root. Roots of different kinds
// may have the same name.
func derivedFrom(c, root *v1alpha1.ShardingConfig) bool {
	owner := metav1.GetControllerOfNoCopy(c)
	return c.Labels[v1alpha1.RootLabel] == root.Name && (owner == nil || owner.UID == root.UID)
}

// selects reports whether a pod belongs to the root. A pod that is assigned to a shard
// stays with the root even if its owner changes.
func (r *root) selects(pod metav1.Object) bool {
	_, assigned := r.State.Members[string(pod.GetUID())]
	return assigned || r.chooses(pod)
}

func (r *root) fill(pod *corev1.Pod, p *meshv1.PodPolicy) {
	if r.dryRun != nil {
		r.renderDryRun(pod, p)
		return
	}
	m, assigned := r.State.Members[string(pod.UID)]
	d := r.derived[m.Shard]
	p.Serial = uint64(r.State.MinSerial)
	switch {
	case assigned && d != nil:
		d.Members = append(d.Members, pod)
		p.Serial = uint64(r.State.Shards[m.Shard].Serial)
		r.renderMember(pod, m, p)
	case assigned:
		p.Refuse = r.refusal(pod, "its shard %s no longer exists: delete the pod", m.Shard)
	case !r.known:
		p.Refuse = r.refusal(pod, "it is not known yet which shard holds what")
	case Withdrawn(r.config) && !r.State.Holds():
		// The pod runs unsharded: the remaining members act on no divided resources.
	case pod.Annotations[v1alpha1.TrustAnnotation] == "":
		p.Refuse = r.refusal(pod, "it was created while the mesh did not admit pods: delete it, so that its successor is admitted")
	case r.State.RolledBack:
		p.Sharding = r.standby(rolledBack)
	case Withdrawn(r.config):
		p.Sharding = r.standby("the shards are being withdrawn: it waits until none owns anything")
	default:
		// The reason must not change while the pod waits, because its agent must confirm
		// this version of the policy. If the pod ran unsharded in between, the
		// configuration changed. The generation then changes the version too, so that an
		// earlier confirmation does not count.
		p.Sharding = r.standby(fmt.Sprintf("it is in no shard yet (generation %d): it waits until the operator's locks are free and a shard lacks a pod", r.config.Generation))
	}
}

// renderMember fills in the policy of a pod of a shard.
func (r *root) renderMember(pod *corev1.Pod, m handover.Member, p *meshv1.PodPolicy) {
	switch {
	case r.State.RolledBack:
		p.Sharding = r.standby(rolledBack)
	case r.Forgotten[m.UID]:
		p.Refuse = r.refusal(pod, "its agent has no record of it as a member of shard %s, so the status of the root may be outdated: it waits until other pods have confirmed which shard owns what", m.Shard)
	case r.State.Holds():
		p.Sharding = r.memberSharding(sharedKey{m.Shard, m.Stale})
		if !r.State.Evidence.Confirmed[m.UID] {
			p.RequiredSerial = uint64(m.Serial)
		}
	case Withdrawn(r.config): // it must not lead once the mesh releases the locks
		p.Sharding = r.standby("the shards were withdrawn: it waits to be replaced by a pod that runs unsharded")
	default:
		p.Sharding = r.standby("no shard owns anything yet: it waits until the operator's locks are free")
	}
}

// serial returns the serial of a pod's shard; 0 for a pod that is not a member.
func (r *root) serial(pod *corev1.Pod) uint64 {
	return uint64(r.State.Shards[r.State.Members[string(pod.UID)].Shard].Serial)
}

// rolledBack is the standby reason while it is unknown which keys other pods own.
const rolledBack = "the status of the root was rolled back: it waits until all pods have confirmed that they act on nothing"

// standby returns the sharding of pods in standby, rendered once per reason.
func (r *root) standby(reason string) *meshv1.Sharding {
	if s := r.waiting[reason]; s != nil {
		return s
	}
	s := r.sharding(r.config.Name)
	s.Limits = r.limits.render()
	standby(s, OperatorLocks(r.config, r.Locks), fmt.Sprintf("%s: %s", origin.Describe(r.config), reason))
	isolate(s, r.config)
	s.FenceNamespaces = s.FenceNamespaces || r.Undivided
	r.waiting[reason] = s
	return s
}

// sharding returns the part of a policy that members of all shards have in common.
func (r *root) sharding(shard string) *meshv1.Sharding {
	spec := r.config.Spec
	return &meshv1.Sharding{
		Shard:  shard,
		Key:    keys[spec.Root.Key],
		Method: methods[spec.Root.Method],

		ExcludedLocks:         excludedLocks(r.config),
		RequestTimeoutSeconds: seconds(r.requestTimeout),
	}
}

func (r *root) refusal(pod *corev1.Pod, format string, args ...any) string {
	return fmt.Sprintf("pod %s/%s is of %s: ", pod.Namespace, pod.Name, origin.Describe(r.config)) + fmt.Sprintf(format, args...)
}

// memberSharding returns the sharding of a shard's members, rendered once per value of t.
func (r *root) memberSharding(t sharedKey) *meshv1.Sharding {
	if s := r.rendered[t]; s != nil {
		return s
	}
	s := r.sharding(t.shard)
	s.KeepCaches, s.Owners = t.stale, r.owners
	s.Locks = r.derived[t.shard].Locks
	r.limit(s, r.State.Shards[t.shard].Sent())
	isolate(s, r.config)
	r.rendered[t] = s
	return s
}

// limit restricts a shard to the scope that it owns.
func (r *root) limit(s *meshv1.Sharding, owned sharding.Scope) {
	s.Limits = r.limits.render()
	for i, l := range r.limits.limits {
		within := owned
		if l.confined {
			within = owned.Intersect(l.within)
		}
		limit := s.Limits[i]
		limit.Scope = within.Proto()
		if s.Method == meshv1.Method_METHOD_LABELS {
			limit.Selector = both(l.selector, within.LabelSelector(r.Namespaces))
		}
	}
}

// refuseLost refuses the assigned pods that no longer exist according to the API: they may
// still run on an unreachable node. The serial is never 0, so that the refusal bars all
// earlier policies for good. An agent keeps the traffic rules that it knows, because the
// refusal contains none.
func (r *root) refuseLost(pods []*corev1.Pod, versions versioner, policies map[types.UID]Policy) {
	lost := map[string]handover.Member{}
	maps.Copy(lost, r.State.Members)
	for _, m := range r.Lost {
		lost[m.UID] = m
	}
	for _, pod := range pods {
		if Labelled(pod) && !Ended(pod) {
			delete(lost, string(pod.UID))
		}
	}
	for uid, m := range lost {
		policies[types.UID(uid)] = versions.finish(m.Node, &meshv1.PodPolicy{
			Uid: uid, Namespace: r.config.Namespace, Name: m.Name, Workload: m.Name,
			Serial: uint64(max(1, m.Serial, r.State.Shards[m.Shard].Serial, r.State.MinSerial)),
			Refuse: fmt.Sprintf("pod %s/%s was deleted or has ended", r.config.Namespace, m.Name),
		}, nil)
	}
}

// both joins two selectors.
func both(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "," + b
}

// dryRun is the plan of a root with spec.dryRun. Its shards own nothing, and the pods act
// on all objects until the dry run ends. So its end is the same as the adoption of any
// running workload.
type dryRun struct {
	placed map[string]string // shards by pod uid
	scopes map[string]sharding.Scope
	owners []*meshv1.Owner
}

// planDryRun divides the keys evenly among the shards, and assigns the pods to shards.
func planDryRun(r *root, pods []*corev1.Pod) *dryRun {
	spec := r.config.Spec.Root
	own := collect.Filter(pods, func(pod *corev1.Pod) bool {
		return pod.Namespace == r.config.Namespace && Labelled(pod) && r.chooses(pod)
	})
	d := &dryRun{scopes: layout.First(spec, nil)}
	d.placed, _ = layout.Place(spec, r.FirstOrdinal, own, nil)
	d.owners = ownersOf(d.scopes)
	return d
}

// renderDryRun fills in the policy of a pod in a dry run. A pod without a shard gets no
// sharding.
func (r *root) renderDryRun(pod *corev1.Pod, p *meshv1.PodPolicy) {
	p.Serial = uint64(r.State.MinSerial)
	if m, assigned := r.State.Members[string(pod.UID)]; assigned {
		// The pod was a member before the dry run: its shard releases its keys.
		p.Serial = uint64(r.State.Shards[m.Shard].Serial)
		if d := r.derived[m.Shard]; d != nil {
			d.Members = append(d.Members, pod)
		}
	}
	shard := r.dryRun.placed[string(pod.UID)]
	if shard == "" {
		return
	}
	t := sharedKey{shard: shard}
	if r.rendered[t] == nil {
		s := r.sharding(shard)
		s.Locks = shardLocks(OperatorLocks(r.config, r.Locks), shard)
		r.limit(s, r.dryRun.scopes[shard])
		s.Owners = r.dryRun.owners
		isolate(s, r.config)
		r.rendered[t] = s
	}
	p.Sharding = r.rendered[t]
}
