package compile

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// What is not among the keys is the default, which is the zero.
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

// UpstreamLock is the name under which a shard's lock is held.
func UpstreamLock(leaderElectionName, shard string) string {
	return leaderElectionName + "---" + shard
}

// lockOf is the lock of a shard of a configuration; nil without leader election.
func lockOf(c *v1alpha1.ShardingConfig, shard string) *meshv1.Lock {
	ctl := c.Spec.Controller
	if ctl == nil || ctl.LeaderElectionName == "" {
		return nil
	}
	return &meshv1.Lock{Namespace: c.Namespace, Name: ctl.LeaderElectionName, UpstreamName: UpstreamLock(ctl.LeaderElectionName, shard)}
}

// render is what members of a configuration that was written by hand are told:
// nil if it divides nothing.
func render(c *v1alpha1.ShardingConfig) (*meshv1.Sharding, *Problem) {
	if PassesThrough(c) {
		if len(c.Spec.Limits) > 0 || c.Spec.Controller != nil {
			return nil, &Problem{ReasonInvalid, "spec.clientCertificates: Passthrough leaves requests unread, so nothing can be divided: remove spec.limits and spec.controller, or choose Refuse"}
		}
		return nil, nil
	}
	limits, problem := limitsOf(c.Spec.Limits, "spec.limits")
	if problem != nil {
		return nil, problem
	}
	for i, l := range limits {
		if s, ok := selectorScope(c.Spec.Limits[i].Selector); ok {
			l.Scope = s.Proto()
		}
	}
	return &meshv1.Sharding{
		Shard:           c.Name,
		Limits:          limits,
		Lock:            lockOf(c, c.Name),
		Method:          meshv1.Method_METHOD_LABELS,
		Isolation:       isolations[c.Spec.Isolation],
		FenceNamespaces: c.Spec.Fence == v1alpha1.FenceNamespace,
	}, nil
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
				return nil, &Problem{ReasonInvalid, fmt.Sprintf("%s[%d].selector: %v", path, i, err)}
			}
			limit.Selector = sel.String()
		}
		out = append(out, limit)
	}
	return out, nil
}
