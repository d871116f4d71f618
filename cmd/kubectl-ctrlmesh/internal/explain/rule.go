package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/proxy/isolation"
	"github.com/ctrlmesh/ctrlmesh/proxy/query"
)

// Sections of the documentation about refusals.
const (
	docs403 = "docs/symptoms.md#403-and-401-refused"
	docs503 = "docs/symptoms.md#503-not-yet-or-not-now"
	docs400 = "docs/symptoms.md#400-to-415-not-understood"
)

// advice is what a user can do about refusals.
var advice = map[meshv1.Refusal]string{
	meshv1.RefusedForeign:       "nothing, if it ends soon after a handover. Otherwise see " + docs403,
	meshv1.RefusedStandby:       "wait for what the message names; see " + docs503,
	meshv1.RefusedContradiction: "do what the message says; see " + docs503,
	meshv1.RefusedUserAgent:     "see " + docs403,
	meshv1.RefusedShadow:        "nothing: a shadow cannot do that; see " + docs403,
	meshv1.RefusedUnknownLock:   "see " + docs503,
	meshv1.RefusedMalformed:     "see " + docs400,
	meshv1.RefusedNotAcceptable: "see " + docs400,
}

// describe names a rule of a configuration; empty without one.
func describe(c *v1alpha1.ShardingConfig, rule string) string {
	if c == nil {
		return ""
	}
	return fmt.Sprintf("%s (%s)", origin.Describe(c), rule)
}

// refusedBy names the rule of the pod's configuration by which a request is refused, and says what a user
// can do about it.
func refusedBy(in inForce, d *evaluated) (rule, do string) {
	do = advice[d.end.Reason]
	if in.config == nil {
		return "", do
	}
	switch d.end.Reason {
	case meshv1.RefusedForeign:
		by := foreignBy(d)
		return describe(in.config, by), cmp.Or(adviceBy[by], do)
	case meshv1.RefusedUserAgent:
		return describe(in.config, "root.defaultOnlyUserAgents"), do
	case meshv1.RefusedShadow:
		return describe(in.config, "shadow"), do
	case meshv1.RefusedStandby:
		return origin.Describe(in.config), do
	}
	return "", do
}

// Rules by which requests for foreign objects are refused.
const (
	byLimits        = "namespaces in resourceSelector or limits"
	byClusterScoped = "clusterScoped: DefaultOnly"
)

// adviceBy is what a user can do if it differs from the usual advice.
var adviceBy = map[string]string{
	byLimits:        "add the namespace there, or list the objects in root.shared; see " + docs403,
	byClusterScoped: "let the default subset write it, or list the objects in root.shared with writes: Everyone; see " + docs403,
}

// foreignBy names the rule by which a request for an object of another shard is refused.
func foreignBy(d *evaluated) string {
	key, info := d.x.Plan.Key, d.x.Req.Info
	if key.MemberCluster && !d.policy.Division.DividesMemberClusters() {
		return "key: Cluster"
	}
	fence, scoped := d.policy.Division.Fence(key), d.policy.Division.ClusterScoped(key)
	_, divided := d.policy.Division.Scope(key.GroupResource())
	switch {
	case fence != nil && fence.Outside(info.Namespace):
		return byLimits
	case scoped != nil && scoped.Refuses(info.Namespace) && (fence == nil || fence.By == isolation.ByNamespace):
		return byClusterScoped
	case !divided:
		return "fence: Namespace"
	case key.Verb == "get":
		return "reads: Own"
	}
	return "isolation: Enforce"
}

// ownerText says which shard of a root owns the object; empty if that is not known.
func ownerText(s *snapshot.Snapshot, q *Request, in inForce) string {
	if in.config == nil || in.config.Spec.Root == nil {
		return ""
	}
	key := report.Key{Namespace: q.Namespace, UID: string(q.UID), Cluster: q.Cluster}
	if q.Resource.isNamespaces() {
		key.Namespace = q.Name
	}
	owner, err := report.OwnerOf(s, in.config, key)
	if err != nil {
		return ""
	}
	return owner.Summary
}

// passed fills in how a request passes isolation.
func (v *Verdict) passed(s *snapshot.Snapshot, q *Request, in inForce, d *evaluated) {
	x := d.x
	switch {
	case x.Lock.Named != nil:
		v.aboutLock(s, in, d)
	case in.GetSharding().GetShadow() != nil && strings.Contains(x.Out.Query, "dryRun="):
		v.Action, v.By = DryRun, describe(in.config, "shadow")
		v.Summary = "passes as a dry run, which changes nothing"
	case v.narrowed(s, q, in, d):
	case x.Exempt && q.writes():
		v.Summary, v.By = "passes unchanged: every shard may write it", describe(in.config, "root.shared")
	case x.Exempt:
		v.Summary = "passes unchanged: every shard may read it"
	default:
		if why := unchanged(q, in, d); why != "" {
			v.Summary = "passes unchanged: " + why
		}
	}
}

// narrowed fills in how a list, watch or deletecollection is narrowed. It reports whether it is.
func (v *Verdict) narrowed(s *snapshot.Snapshot, q *Request, in inForce, d *evaluated) bool {
	selector, _, _ := query.Get(d.x.Out.Query, "labelSelector") // as it was built here
	switch {
	case selector == isolation.Nothing.String():
		v.By, v.Summary, v.Owner = describe(in.config, narrowedBy(d)), nothing(q, d), ownerText(s, q, in)
	case d.x.Narrowed.Narrowing != nil:
		v.By = describe(in.config, "method: "+string(method(in)))
		v.Summary = fmt.Sprintf("narrowed to the objects of shard %s: %s%s", d.policy.Shard, owns(in, d), how(in, d))
	case selector != "":
		v.By, v.Summary = describe(in.config, "selectors of limits"), "narrowed by the label selector "+shortened(selector)
		if in.config.Spec.Root != nil && method(in) == v1alpha1.MethodLabels {
			v.By = describe(in.config, "method: Labels")
		}
	default:
		return false
	}
	v.Action = Narrowed
	return true
}

// method returns how lists and watches of a pod are narrowed.
func method(in inForce) v1alpha1.Method {
	switch in.GetSharding().GetMethod() {
	case meshv1.Method_METHOD_SERVER_SIDE:
		return v1alpha1.MethodServerSide
	case meshv1.Method_METHOD_FILTER:
		return v1alpha1.MethodFilter
	case meshv1.Method_METHOD_LABELS:
		return v1alpha1.MethodLabels
	}
	return v1alpha1.MethodAuto
}

// unchanged says why a request passes as it is; empty if there is nothing to say.
func unchanged(q *Request, in inForce, d *evaluated) string {
	key := d.x.Plan.Key
	switch {
	case in.config == nil:
		return "no ShardingConfig selects the pod"
	case in.GetSharding() == nil || in.GetSharding().GetDryRun() || key.MemberCluster:
		return ""
	}
	if fence := d.policy.Division.Fence(key); fence != nil {
		return fencedIn(q, in, d, fence)
	}
	owned, divided := d.policy.Division.Scope(key.GroupResource())
	switch {
	case !divided && d.policy.Division.Selector(key.GroupResource()) == nil:
		return q.Resource.String() + " is not divided"
	case divided && key.Verb == "get":
		return "every shard may read it (reads: All)"
	case divided && owned.Owns(q.Namespace) && in.GetSharding().GetKey() == meshv1.Key_KEY_NAMESPACE && q.Namespace != "":
		return fmt.Sprintf("shard %s owns namespace %s", d.policy.Shard, q.Namespace)
	case in.GetSharding().GetIsolation() == meshv1.Isolation_ISOLATION_OFF:
		return "nothing is refused (isolation: Off)"
	}
	return ""
}

// fencedIn says why a request passes a fence.
func fencedIn(q *Request, in inForce, d *evaluated, fence *isolation.Fence) string {
	switch {
	case fence.Observe:
		return ""
	case fence.By == isolation.ByUID && d.looked && q.UID == "":
		return "the object does not exist, and so belongs to no shard"
	case fence.By == isolation.ByUID && q.UID != "" && fence.Owns(string(q.UID)):
		return fmt.Sprintf("shard %s owns the object", d.policy.Shard)
	case fence.By == isolation.ByNamespace && q.Namespace != "" && fence.Owns(q.Namespace):
		return fmt.Sprintf("shard %s owns namespace %s", d.policy.Shard, q.Namespace)
	case fence.By == isolation.ByNamespace && q.Namespace == in.GetNamespace():
		return "it is in the operator's own namespace"
	}
	return ""
}

// maxSelector bounds the label selector that is shown, in bytes: it may name each namespace.
const maxSelector = 200

func shortened(selector string) string {
	if len(selector) <= maxSelector {
		return selector
	}
	return fmt.Sprintf("%s... (%d characters)", selector[:maxSelector], len(selector))
}

// narrowedBy names the rule by which a list, watch or deletecollection finds nothing.
func narrowedBy(d *evaluated) string {
	if _, divided := d.policy.Division.Scope(d.x.Plan.Key.GroupResource()); !divided {
		return "fence: Namespace"
	}
	return "root.resourceSelector or limits"
}

// nothing says why a list, watch or deletecollection finds nothing.
func nothing(q *Request, d *evaluated) string {
	text := "finds nothing"
	if q.Verb == "deletecollection" {
		text = "deletes nothing"
	}
	switch {
	case d.policy.Division.Standby:
		return text + ": the pod is in standby"
	case q.Namespace == "":
		return fmt.Sprintf("%s: shard %s owns nothing", text, d.policy.Shard)
	}
	return fmt.Sprintf("%s in namespace %s: %s", text, q.Namespace, d.policy.Division.Owner(q.Namespace))
}

// maxRanges bounds the ranges of keys that are named.
const maxRanges = 3

// owns names the keys that the shard of a pod owns of a resource.
func owns(in inForce, d *evaluated) string {
	owned, _ := d.policy.Division.Scope(d.x.Plan.Key.GroupResource())
	texts := owned.Strings()
	more := ""
	if n := len(texts) - maxRanges; n > 0 {
		texts, more = texts[:maxRanges], fmt.Sprintf(" and %d more ranges", n)
	}
	text := "keys " + strings.Join(texts, ", ") + more
	if root := in.config.Status.Root; root != nil && in.GetSharding().GetKey() == meshv1.Key_KEY_NAMESPACE {
		i := slices.IndexFunc(root.Shards, func(s v1alpha1.ShardStatus) bool { return s.Name == d.policy.Shard && s.Namespaces > 0 })
		if i >= 0 {
			text += fmt.Sprintf(" (%d namespaces)", root.Shards[i].Namespaces)
		}
	}
	return text
}

// how says who narrows a list or watch.
func how(in inForce, d *evaluated) string {
	switch {
	case d.x.Narrowed.ShardSelector == "":
		return ", by the proxy"
	case in.config.Status.Method != "":
		return ", by a shardSelector; method now: " + in.config.Status.Method
	}
	return ", by a shardSelector, or else by the proxy"
}

// aboutLock fills in what happens to a request about a lock.
func (v *Verdict) aboutLock(s *snapshot.Snapshot, in inForce, d *evaluated) {
	l := d.x.Lock.Named
	upstream := l.Name()
	for _, of := range in.GetSharding().GetLocks() {
		if l.Named(of.GetNamespace(), of.GetName()) {
			upstream = of.GetUpstreamName()
		}
	}
	if d.policy.Division.Standby {
		v.Summary, v.By = "passes unchanged: in standby, locks keep their names and are only read", origin.Describe(in.config)
	} else {
		v.Action, v.By = Renamed, describe(in.config, "locks")
		v.Summary = fmt.Sprintf("lock %s/%s is %s at the apiserver", l.Namespace(), l.Name(), upstream)
	}
	name := types.NamespacedName{Namespace: l.Namespace(), Name: upstream}
	switch lease, found := s.Leases[name]; {
	case !s.LeasesRead[name.Namespace]:
		v.Notes = append(v.Notes, "the holder of the lock is unknown: you need permission to list leases in namespace "+name.Namespace)
	case found:
		if holder, _ := snapshot.Holder(&lease, s.Now); holder != "" {
			v.Summary += "; held by " + holder
		} else {
			v.Summary += "; held by nobody"
		}
	}
	for _, of := range in.config.Status.Locks {
		if l.Named(of.Namespace, of.Name) && of.Holder != "" && !of.HeldByMesh {
			v.Notes = append(v.Notes, fmt.Sprintf("%s holds lock %s/%s outside the mesh", of.Holder, of.Namespace, of.Name))
		}
	}
}
