package explain

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/acting"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
	"github.com/ctrlmesh/ctrlmesh/manager/transfer"
)

// inForce is the policy of a pod that follows from the objects in force.
type inForce struct {
	*meshv1.PodPolicy
	// config selects the pod, as its shards act by it; nil if none does.
	config *v1alpha1.ShardingConfig
	// notes say what is unknown.
	notes []string
}

// policies are those of all labelled pods of a namespace.
type policies struct {
	compile.Result
	// notes say what is unknown.
	notes []string
}

// policyOf compiles the policy of a labelled pod.
func policyOf(s *snapshot.Snapshot, pod *corev1.Pod) (inForce, error) {
	all, err := policiesOf(s)
	if err != nil {
		return inForce{}, err
	}
	return all.of(pod)
}

// policiesOf compiles the policies of labelled pods, as the manager does.
func policiesOf(s *snapshot.Snapshot) (policies, error) {
	out := policies{}
	configs := make([]*v1alpha1.ShardingConfig, len(s.Configs))
	for i := range s.Configs {
		configs[i] = s.Configs[i].DeepCopy()
	}
	if err := s.Requires(snapshot.Namespaces); err != nil && needsNamespaces(s) {
		return out, fmt.Errorf("%w: you need permission to list namespaces", err)
	}
	known := out.states(s, configs)
	acting.Enact(configs, func(c *v1alpha1.ShardingConfig) (compile.Root, bool) {
		root, ok := known[origin.Of(c)]
		return root, ok
	})
	for uid, a := range (transfer.Memory{}).Enact(configs) {
		for _, c := range configs {
			if c.UID == uid && a.Sent == transfer.None {
				one := known[origin.Of(c)]
				one.Standby = cmp.Or(one.Standby, transfer.Standby)
				known[origin.Of(c)] = one
			}
		}
	}
	out.resolve(s, configs)
	out.Result = compile.Compile(configs, collect.Pointers(s.Pods), known, rulesOf(s))
	return out, nil
}

// of returns the policy of a pod.
func (p policies) of(pod *corev1.Pod) (inForce, error) {
	policy, ok := p.Policies[pod.UID]
	if !ok {
		return inForce{}, errors.New("the pod has ended, or was replaced just now: run the command again")
	}
	out := inForce{PodPolicy: policy.PodPolicy, notes: slices.Clone(p.notes)}
	for _, shard := range p.Shards {
		if shard.Root == nil && slices.ContainsFunc(shard.Members, func(m *corev1.Pod) bool { return m.UID == pod.UID }) {
			out.config = cmp.Or(out.config, shard.Config)
		}
	}
	return out, nil
}

// states returns the states of configurations that are on record.
func (p *policies) states(s *snapshot.Snapshot, configs []*v1alpha1.ShardingConfig) map[origin.Name]compile.Root {
	known := map[origin.Name]compile.Root{}
	for _, c := range configs {
		ready := operator.Condition(c, v1alpha1.ConditionReady)
		unknown := ready.Reason == string(v1alpha1.ReasonUnknownResource)
		switch {
		case c.Spec.Root != nil:
			state, err := decide.Load(c.Status.Root)
			if err != nil {
				p.notes = append(p.notes, fmt.Sprintf("the status of %s is invalid: %v", origin.Describe(c), err))
				continue
			}
			stored := decide.Stored{Status: c.Status, State: state}
			if c.Status.Root != nil {
				stored.Acting = c.Status.Root.Acting
			}
			one := decide.Memory{}.Published(stored, 0)
			one.Namespaces, one.Undivided = slices.Sorted(maps.Keys(s.Labels)), unknown
			known[origin.Of(c)] = one
		case compile.HandWritten(c):
			one := compile.Root{Locks: c.Status.Locks, Undivided: unknown && !compile.Shadows(c)}
			if unknown {
				one.Standby = ready.Message
			} else if !compile.Shadows(c) {
				one.Standby = unheld(c)
			}
			known[origin.Of(c)] = one
		}
	}
	return known
}

// unheld returns why a pod outside the mesh may lead beside the members of a hand-written
// configuration, by its status; empty if none may.
func unheld(c *v1alpha1.ShardingConfig) string {
	for _, name := range compile.NamedLocks(c) {
		if !slices.ContainsFunc(c.Status.Locks, func(l v1alpha1.LockStatus) bool {
			return l.HeldByMesh && l.Namespace == name.Namespace && l.Name == name.Name
		}) {
			return compile.Unheld(name)
		}
	}
	return ""
}

// resolve adds what configurations depend on beside their specs.
func (p *policies) resolve(s *snapshot.Snapshot, configs []*v1alpha1.ShardingConfig) {
	for _, c := range configs {
		if c.Spec.Root == nil {
			continue
		}
		if err := layout.Resolve(&c.Spec, s.Labels); err != nil {
			p.notes = append(p.notes, fmt.Sprintf("the selectors of namespaces in %s cannot be followed: %v", origin.Describe(c), err))
		}
	}
	origin.Conflicts(configs)
	settings := platform.Default()
	if s.Mesh.Settings != nil {
		if parsed, err := platform.Parse(s.Mesh.Settings.Data); err == nil {
			settings = parsed
		}
	}
	for _, c := range configs {
		layout.Exclude(&c.Spec, settings.Undivided())
	}
}

// rulesOf returns the traffic rules. Shares are left out: the status has them.
func rulesOf(s *snapshot.Snapshot) compile.Rules {
	rules := compile.Rules{Now: s.Now, Breakers: append(collect.Pointers(s.Subjects.Breakers), s.Subjects.Translated...), Injections: collect.Pointers(s.Subjects.Faults)}
	for name, of := range s.Labels {
		if compile.ForbidsFaults(&metav1.ObjectMeta{Labels: of}) {
			rules.NoFaults = append(rules.NoFaults, name)
		}
	}
	return rules
}

// needsNamespaces reports whether the policy of a pod may depend on the labels of namespaces.
func needsNamespaces(s *snapshot.Snapshot) bool {
	return len(s.Subjects.Faults) > 0 || slices.ContainsFunc(s.Configs, func(c v1alpha1.ShardingConfig) bool {
		if c.Spec.Root == nil {
			return false
		}
		return layout.ByLabels(c.Spec.Root) || slices.ContainsFunc(slices.Concat(c.Spec.Root.ResourceSelector, c.Spec.Limits), func(l v1alpha1.ObjectLimiter) bool {
			return slices.ContainsFunc(l.Namespaces, func(m v1alpha1.NamespaceMatch) bool { return m.Selector != nil || m.Pattern != "" })
		})
	})
}
