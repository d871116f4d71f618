package dialect

import (
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// stamped are the labels that Kridge sets on objects, with those that the mesh sets. Two
// versions of Kridge named the bucket differently.
var stamped = map[string]string{
	kridge.GroupName + "/namespace":     v1alpha1.NamespaceLabel,
	kridge.GroupName + "/sharding-hash": v1alpha1.ShardingHashLabel,
	kridge.GroupName + "/shard-hash":    v1alpha1.ShardingHashLabel,
	kridge.GroupName + "/control":       v1alpha1.ControlLabel,
}

const otherBuckets = "the buckets of namespaces are not those of Kridge, because the mesh computes another hash: select other buckets, or namespaces by name"

// ShardingConfig translates Kridge's ShardingConfig to the native one. One that Kridge derived
// from a root is an error.
func ShardingConfig(in *kridge.ShardingConfig) (Translation, field.ErrorList) {
	s := shardingConfig{in: in}
	s.Config = newConfig(in.ObjectMeta)
	if root := in.Labels[kridge.RootLabel]; root != "" {
		return s.Translation, field.ErrorList{field.Forbidden(field.NewPath("metadata", "labels").Key(kridge.RootLabel),
			fmt.Sprintf("Kridge derived this shard from ShardingConfig %s, and the mesh derives its own: delete it", root))}
	}
	s.Config.Spec.Selector = in.Spec.Selector.DeepCopy()
	s.errs = append(s.errs, selects(in.Spec.Selector, spec.Child("selector"))...)
	if in.Spec.Root == nil && empty(in.Spec.Selector) {
		s.errs = append(s.errs, field.Required(spec.Child("selector"), "name the pods of this shard: an empty selector would take every pod of the namespace"))
	}
	s.configuration()
	if in.Spec.Root == nil && len(in.Spec.Limits) == 0 {
		s.errs = append(s.errs, field.Required(spec.Child("limits"), "list at least one limit: the resources that this shard divides and the selector of its part"))
	}
	for i, l := range in.Spec.Limits {
		s.Config.Spec.Limits = append(s.Config.Spec.Limits, s.limit(l, in.Spec.Root == nil, spec.Child("limits").Index(i)))
	}
	if in.Spec.Root != nil {
		s.root(in.Spec.Root, spec.Child("root"))
	}
	return s.Translation, checked(s.Config, s.errs)
}

// shardingConfig is a ShardingConfig during its translation.
type shardingConfig struct {
	in *kridge.ShardingConfig
	Translation
	errs field.ErrorList
}

func (s *shardingConfig) configuration() {
	if ctl := s.in.Spec.Controller; ctl != nil {
		var election *string
		if ctl.LeaderElection != nil {
			election = &ctl.LeaderElection.LockName
		}
		lock, errs := lockOf(ctl.LeaderElectionName, election, spec.Child("controller"))
		s.Config.Spec.Controller = lock
		s.errs = append(s.errs, errs...)
	}
	if w := s.in.Spec.Webhook; w != nil {
		webhook, errs := webhookOf(w.CertDir, w.Port, spec.Child("webhook"))
		s.Config.Spec.Webhook = webhook
		s.errs = append(s.errs, errs...)
	}
}

func (s *shardingConfig) root(in *kridge.RootConfig, path *field.Path) {
	out := newRoot(in.Prefix)
	out.TargetStatefulSet = in.TargetStatefulSet
	if in.Disable != nil {
		out.Disable = new(*in.Disable)
	}
	if c := in.Canary; c != nil {
		out.Canary = &v1alpha1.CanaryConfig{InNamespaces: slices.Clone(c.InNamespaces), InShardHash: slices.Clone(c.InShardHash)}
		if c.Replicas != nil {
			out.Canary.Replicas = new(*c.Replicas)
		}
		if len(c.InShardHash) > 0 {
			s.warn(path.Child("canary", "inShardHash"), otherBuckets)
		}
		if len(c.InShardHash) > 0 && len(c.InNamespaces) > 0 {
			s.warn(path.Child("canary"), "the canary owns the namespaces in inNamespaces and those in inShardHash, where Kridge gives it those in both")
		}
	}
	if a := in.Auto; a != nil {
		out.Auto = &v1alpha1.AutoConfig{ShardingSize: a.ShardingSize, EveryShardReplicas: a.EveryShardReplicas, Rebalance: v1alpha1.RebalanceAutomatic}
	}
	for i, l := range in.ResourceSelector {
		out.ResourceSelector = append(out.ResourceSelector, s.limit(l, false, path.Child("resourceSelector").Index(i)))
	}
	if len(in.ResourceSelector)+len(s.in.Spec.Limits) == 0 {
		s.errs = append(s.errs, field.Required(path.Child("resourceSelector"), "list the resources that the shards divide"))
	}
	s.Config.Spec.Root = out
}

// limit translates a limit. If selecting is set, it requires a selector.
func (s *shardingConfig) limit(in kridge.ObjectLimiter, selecting bool, path *field.Path) v1alpha1.ObjectLimiter {
	groups, selector := in.RelateResources, in.Selector
	if nested := in.ObjectSelector; nested != nil {
		if len(groups) > 0 || selector != nil {
			s.errs = append(s.errs, field.Forbidden(path, "write relateResources and selector both within objectSelector, or both outside it"))
		}
		groups, selector, path = nested.RelateResources, nested.Selector, path.Child("objectSelector")
	}
	if len(groups) == 0 {
		s.errs = append(s.errs, field.Required(path.Child("relateResources"), "name the resources"))
	}
	if selecting && empty(selector) {
		s.errs = append(s.errs, field.Required(path.Child("selector"), "say which objects are this shard's: an empty selector would give it all of them"))
	}
	s.errs = append(s.errs, selects(selector, path.Child("selector"))...)
	return v1alpha1.ObjectLimiter{
		RelateResources: collect.Map(groups, func(g kridge.ResourceGroup) v1alpha1.ResourceGroup {
			return v1alpha1.ResourceGroup{APIGroups: slices.Clone(g.APIGroups), Resources: slices.Clone(g.Resources)}
		}),
		Selector: s.renamed(selector, path.Child("selector")),
	}
}

// renamed returns a selector with the labels that the mesh sets instead of those of Kridge.
func (s *shardingConfig) renamed(in *metav1.LabelSelector, path *field.Path) *metav1.LabelSelector {
	if in == nil {
		return nil
	}
	hashes := false
	rename := func(key string) string {
		native, known := stamped[key]
		if !known {
			return key
		}
		hashes = hashes || native == v1alpha1.ShardingHashLabel
		return native
	}
	out := &metav1.LabelSelector{}
	for _, key := range slices.Sorted(maps.Keys(in.MatchLabels)) {
		to, value := rename(key), in.MatchLabels[key]
		if _, taken := out.MatchLabels[to]; taken {
			s.errs = append(s.errs, field.Forbidden(path.Child("matchLabels").Key(key), "the mesh calls this label "+to+", which the selector also requires: remove one of them"))
			continue
		}
		if out.MatchLabels == nil {
			out.MatchLabels = map[string]string{}
		}
		out.MatchLabels[to] = value
	}
	for _, r := range in.MatchExpressions {
		out.MatchExpressions = append(out.MatchExpressions, metav1.LabelSelectorRequirement{Key: rename(r.Key), Operator: r.Operator, Values: slices.Clone(r.Values)})
	}
	if hashes {
		s.warn(path, otherBuckets)
	}
	return out
}
