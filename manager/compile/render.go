package compile

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Values that are missing here mean the default, which is the zero value.
var (
	isolations = map[v1alpha1.Isolation]meshv1.Isolation{
		v1alpha1.IsolationObserve: meshv1.Isolation_ISOLATION_OBSERVE,
		v1alpha1.IsolationOff:     meshv1.Isolation_ISOLATION_OFF,
	}
	keys = map[v1alpha1.Key]meshv1.Key{
		v1alpha1.KeyObject: meshv1.Key_KEY_OBJECT,
	}
	methods = map[v1alpha1.Method]meshv1.Method{
		v1alpha1.MethodServerSide: meshv1.Method_METHOD_SERVER_SIDE,
		v1alpha1.MethodLabels:     meshv1.Method_METHOD_LABELS,
		v1alpha1.MethodFilter:     meshv1.Method_METHOD_FILTER,
	}
)

// UpstreamLock returns the name of a shard's lock at the apiserver.
func UpstreamLock(leaderElectionName, shard string) string {
	return leaderElectionName + "---" + shard
}

// render returns the sharding of a hand-written configuration's members; nil if it
// divides nothing.
func render(c *v1alpha1.ShardingConfig, known Root) (*meshv1.Sharding, *Problem) {
	if PassesThrough(c) {
		if len(c.Spec.Limits) > 0 || c.Spec.Controller != nil {
			return nil, &Problem{v1alpha1.ReasonInvalid, "spec.clientCertificates: Passthrough leaves requests unread, so nothing can be divided: remove spec.limits and spec.controller, or choose Refuse"}
		}
		return nil, nil
	}
	limits, problem := limitsOf(c.Spec.Limits, "spec.limits")
	if problem != nil {
		return nil, problem
	}
	out := &meshv1.Sharding{
		Shard:  c.Name,
		Limits: limits,
		Method: meshv1.Method_METHOD_LABELS,
	}
	if known.Standby != "" && !c.Spec.DryRun {
		standby(out, OperatorLocks(c, known.Locks), known.Standby)
		isolate(out, c)
		return out, nil
	}
	locks := renamedLocks(c, known.Locks)
	if c.Spec.DryRun { // members contend for all locks under the operator's own names
		locks = OperatorLocks(c, known.Locks)
	}
	out.Locks = shardLocks(locks, c.Name)
	for i, l := range limits {
		if s, ok := selectorScope(c.Spec.Limits[i].Selector); ok {
			l.Scope = s.Proto()
		}
	}
	isolate(out, c)
	return out, nil
}

// standby renders a sharding in which a pod owns nothing and leads nothing.
func standby(s *meshv1.Sharding, locks []types.NamespacedName, reason string) {
	s.Standby, s.StandbyReason = true, reason
	s.Locks = shardLocks(locks, "")
	nothing := sharding.Scope{}.Proto()
	for _, l := range s.Limits {
		l.Scope = nothing
	}
}

// limitsOf renders resources and selectors.
func limitsOf(in []v1alpha1.ObjectLimiter, path string) ([]*meshv1.Limit, *Problem) {
	var out []*meshv1.Limit
	for i, l := range in {
		limit := &meshv1.Limit{}
		for _, r := range l.RelateResources {
			limit.Resources = append(limit.Resources, &meshv1.ResourceGroup{ApiGroups: r.APIGroups, Resources: r.Resources})
		}
		if l.Selector != nil {
			sel, err := metav1.LabelSelectorAsSelector(l.Selector)
			if err != nil {
				return nil, &Problem{v1alpha1.ReasonInvalid, fmt.Sprintf("%s[%d].selector: %v", path, i, err)}
			}
			limit.Selector = sel.String()
		}
		out = append(out, limit)
	}
	return out, nil
}
