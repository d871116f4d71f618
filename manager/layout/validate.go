package layout

import (
	"fmt"
	"math"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/expression"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// MaxShards is the maximum number of automatic shards of a root.
const MaxShards = 64

// MaxPairs is how many pairs of group and resource an object may name. Short lists of both have
// many, and to compare objects takes memory and time for each.
const MaxPairs = 16 << 10

// Pairs returns the number of pairs of group and resource that groups name.
func Pairs(groups []v1alpha1.ResourceGroup) (n int) {
	for _, g := range groups {
		n += len(g.APIGroups) * len(g.Resources)
	}
	return n
}

// ManyPairs is the error of an object that names more than MaxPairs.
func ManyPairs(n int) string {
	return fmt.Sprintf("it names %d pairs of group and resource, and at most %d are supported: list resources beside their own groups alone", n, MaxPairs)
}

// Validate returns the errors of a root. For keys that would have no owner, or two, it names
// an example.
func Validate(root *v1alpha1.RootConfig, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, problem := range validation.IsDNS1123Subdomain(canaryName(root)) {
		errs = append(errs, field.Invalid(path.Child("prefix"), root.Prefix, "shards would be named like "+canaryName(root)+": "+problem))
	}
	errs = append(errs, validateTarget(root, path)...)
	switch {
	case ByLabels(root):
		errs = append(errs, validateSubsets(root, path)...)
	case root.Canary == nil && root.Auto == nil:
		errs = append(errs, field.Required(path.Child("auto"), "set auto, canary, both, or subsets"))
	}
	errs = append(errs, validateAuto(root.Auto, path.Child("auto"))...)
	errs = append(errs, validateKey(root, path)...)
	if len(root.DefaultOnlyUserAgents) > 0 && !ByLabels(root) {
		errs = append(errs, field.Forbidden(path.Child("defaultOnlyUserAgents"), "it requires subsets or targetSelector: without them there is no default subset"))
	}
	if root.ClusterScoped == v1alpha1.ClusterScopedDefaultOnly && !ByLabels(root) {
		errs = append(errs, field.Forbidden(path.Child("clusterScoped"), "DefaultOnly requires subsets or targetSelector: without them there is no default subset"))
	}
	if root.Canary == nil {
		return errs
	}
	if problems := validateCanary(root.Canary, path.Child("canary")); len(problems) > 0 {
		return append(errs, problems...)
	}
	return append(errs, validateRest(root, path)...)
}

func validateAuto(auto *v1alpha1.AutoConfig, path *field.Path) (errs field.ErrorList) {
	if auto == nil {
		return nil
	}
	if auto.ShardingSize < 1 || auto.ShardingSize > MaxShards {
		errs = append(errs, field.Invalid(path.Child("shardingSize"), auto.ShardingSize, validation.InclusiveRangeError(1, MaxShards)))
	}
	if auto.EveryShardReplicas < 1 {
		errs = append(errs, field.Invalid(path.Child("everyShardReplicas"), auto.EveryShardReplicas, validation.InclusiveRangeError(1, math.MaxInt32)))
	}
	return errs
}

// validateKey returns the errors of settings that the key does not allow.
func validateKey(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	switch root.Key {
	case v1alpha1.KeyObject:
		errs = validateByObject(root, path)
	case v1alpha1.KeyCluster:
		return validateByCluster(root, path)
	}
	if c := root.Canary; c != nil && len(c.InClusters) > 0 {
		errs = append(errs, field.Forbidden(path.Child("canary", "inClusters"), "it requires key: Cluster"))
	}
	return errs
}

// validateByObject returns the errors of settings that key: Object does not allow.
func validateByObject(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	if len(root.Subsets) > 0 {
		errs = append(errs, field.Forbidden(path.Child("subsets"), "objects are assigned by uid (key: Object), which leaves no namespaces to give to subsets: remove subsets, or choose key: Namespace"))
	}
	if root.Canary != nil {
		errs = append(errs, field.Forbidden(path.Child("canary"), "objects are assigned by uid (key: Object), which leaves no namespaces to give to a canary: remove canary, or choose key: Namespace"))
	}
	if root.ClusterScoped == v1alpha1.ClusterScopedDefaultOnly {
		errs = append(errs, field.Forbidden(path.Child("clusterScoped"), "objects in no namespace are assigned by uid, too (key: Object): choose Everyone"))
	}
	if root.Method == v1alpha1.MethodLabels {
		errs = append(errs, field.NotSupported(path.Child("method"), root.Method, []v1alpha1.Method{v1alpha1.MethodAuto, v1alpha1.MethodServerSide, v1alpha1.MethodFilter}))
	}
	return errs
}

// validateByCluster returns the errors of settings that key: Cluster does not allow.
func validateByCluster(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	if ByLabels(root) {
		errs = append(errs, field.Forbidden(path.Child("subsets"), "clusters are assigned by their names (key: Cluster), which leaves no namespaces to give to subsets: remove subsets and targetSelector"))
	}
	if c := root.Canary; c != nil && (len(c.InNamespaces) > 0 || c.InNamespaceSelector != nil) {
		errs = append(errs, field.Forbidden(path.Child("canary"), "clusters are assigned by their names (key: Cluster), which leaves no namespaces to give to a canary: name clusters in inClusters"))
	}
	if root.Method != "" && root.Method != v1alpha1.MethodAuto && root.Method != v1alpha1.MethodFilter {
		errs = append(errs, field.NotSupported(path.Child("method"), root.Method, []v1alpha1.Method{v1alpha1.MethodAuto, v1alpha1.MethodFilter}))
	}
	return errs
}

// validateRest returns the errors of a valid canary together with the remaining keys.
func validateRest(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	taken := takenBy(root)
	rest := sharding.All().Minus(taken)
	if root.Auto != nil && rest.Empty() {
		errs = append(errs, field.Invalid(path.Child("canary", "inShardHash"), root.Canary.InShardHash,
			fmt.Sprintf("all %d buckets are the canary's, so that the shards of auto would own nothing: even namespace default would be the canary's. Leave out a bucket, or remove auto", sharding.Buckets)))
	}
	switch {
	case root.Method == v1alpha1.MethodServerSide && root.Canary.InNamespaceSelector != nil:
		errs = append(errs, manyRanges(path, "inNamespaceSelector"))
	case root.Method == v1alpha1.MethodServerSide:
		for _, s := range []sharding.Scope{taken, rest} {
			if _, ok := s.ShardSelector("object.metadata.namespace"); !ok && !s.Empty() {
				errs = append(errs, field.Forbidden(path.Child("method"), fmt.Sprintf("a shardSelector knows neither buckets nor more than %d ranges, which this canary needs: choose another method, or give the canary fewer namespaces and no buckets", sharding.MaxShardRanges)))
				break
			}
		}
	}
	return errs
}

func validateCanary(c *v1alpha1.CanaryConfig, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if c.Replicas == nil || *c.Replicas < 1 {
		errs = append(errs, field.Required(path.Child("replicas"), "say how many pods the canary has, at least 1"))
	}
	if len(c.InNamespaces)+len(c.InClusters)+len(c.InShardHash) == 0 && c.InNamespaceSelector == nil {
		errs = append(errs, field.Required(path.Child("inNamespaces"), "list inNamespaces, inNamespaceSelector, inClusters, inShardHash, or several of them: the canary would own nothing"))
	}
	errs = append(errs, validateNames(c.InNamespaces, path.Child("inNamespaces"), validation.IsDNS1123Label)...)
	errs = append(errs, validateNames(c.InClusters, path.Child("inClusters"), validation.IsDNS1123Subdomain)...)
	errs = append(errs, validateSelector(c.InNamespaceSelector, path.Child("inNamespaceSelector"))...)
	seen := map[string]bool{}
	for i, text := range c.InShardHash {
		path := path.Child("inShardHash").Index(i)
		if seen[text] {
			errs = append(errs, field.Duplicate(path, text))
		}
		seen[text] = true
		if b, err := strconv.Atoi(text); err != nil || b < 0 || b >= sharding.Buckets || text != strconv.Itoa(b) {
			errs = append(errs, field.Invalid(path, text, fmt.Sprintf("a bucket is a number from 0 to %d", sharding.Buckets-1)))
		}
	}
	return errs
}

// manyRanges refuses method ServerSide for scopes whose number of ranges depends on the cluster.
func manyRanges(path *field.Path, by string) *field.Error {
	return field.Forbidden(path.Child("method"), fmt.Sprintf("a shardSelector has at most %d ranges, and %s may need more: choose method Auto", sharding.MaxShardRanges, by))
}

// validateTarget returns the errors in how a root names its pods.
func validateTarget(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	set := []bool{root.TargetRef != nil && root.TargetRef.Name != "", root.TargetStatefulSet != "", root.TargetSelector != nil}
	if collect.Count(set, func(is bool) bool { return is }) != 1 {
		errs = append(errs, field.Required(path.Child("targetRef"), "name the operator's pods by one of targetRef, targetSelector and targetStatefulSet"))
	}
	if s := root.TargetSelector; s != nil {
		if len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
			errs = append(errs, field.Required(path.Child("targetSelector"), "an empty selector would take every pod of the namespace"))
		}
		errs = append(errs, validateSelector(s, path.Child("targetSelector"))...)
	}
	if root.Rollout != nil && Target(root).Kind != StatefulSet {
		errs = append(errs, field.Forbidden(path.Child("rollout"), "it replaces the pods of a StatefulSet: name one by targetRef, or remove rollout"))
	}
	return errs
}

func validateSubsets(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	if root.Auto != nil || root.Canary != nil {
		errs = append(errs, field.Forbidden(path.Child("subsets"), "auto and canary assign the pods of one workload: remove them, or remove subsets and name the workload by targetRef"))
	}
	if root.Method == v1alpha1.MethodServerSide && len(root.Subsets) > 0 {
		errs = append(errs, manyRanges(path, "subsets"))
	}
	seen := map[string]bool{v1alpha1.DefaultSubset: true}
	for i, s := range root.Subsets {
		path := path.Child("subsets").Index(i)
		if seen[s.Name] {
			errs = append(errs, field.Duplicate(path.Child("name"), s.Name))
		}
		seen[s.Name] = true
		for _, problem := range validation.IsDNS1123Label(s.Name) {
			errs = append(errs, field.Invalid(path.Child("name"), s.Name, problem))
		}
		if len(s.PodLabels) == 0 {
			errs = append(errs, field.Required(path.Child("podLabels"), "name the labels of its pods: it would have all pods"))
		}
		errs = append(errs, validateSelector(&metav1.LabelSelector{MatchLabels: s.PodLabels}, path.Child("podLabels"))...)
		if len(s.Namespaces) == 0 {
			errs = append(errs, field.Required(path.Child("namespaces"), "match namespaces: the subset would own nothing"))
		}
		errs = append(errs, ValidateMatches(s.Namespaces, path.Child("namespaces"))...)
	}
	return errs
}

// ValidateMatches returns the errors in a list of matches of namespaces.
func ValidateMatches(matches []v1alpha1.NamespaceMatch, path *field.Path) (errs field.ErrorList) {
	errs = validatePatterns(matches, path)
	for i, m := range matches {
		path := path.Index(i)
		errs = append(errs, validateNames(m.Names, path.Child("names"), validation.IsDNS1123Label)...)
		errs = append(errs, validateSelector(m.Selector, path.Child("selector"))...)
	}
	return errs
}

// validatePatterns returns the first error in the patterns of a list of matches.
func validatePatterns(matches []v1alpha1.NamespaceMatch, path *field.Path) field.ErrorList {
	program := 0
	for i, m := range matches {
		if m.Pattern == "" {
			continue
		}
		pattern, err := expression.Compile(m.Pattern)
		if err == nil {
			if program += pattern.Program; program > maxPrograms {
				err = errPrograms
			}
		}
		if err != nil {
			return field.ErrorList{field.Invalid(path.Index(i).Child("pattern"), m.Pattern, err.Error())}
		}
	}
	return nil
}

func validateSelector(s *metav1.LabelSelector, path *field.Path) field.ErrorList {
	return metav1validation.ValidateLabelSelector(s, metav1validation.LabelSelectorValidationOptions{}, path)
}

// validateNames returns the errors in a list of names.
func validateNames(names []string, path *field.Path, check func(string) []string) (errs field.ErrorList) {
	seen := map[string]bool{}
	for i, name := range names {
		path := path.Index(i)
		if seen[name] {
			errs = append(errs, field.Duplicate(path, name))
		}
		seen[name] = true
		for _, problem := range check(name) {
			errs = append(errs, field.Invalid(path, name, problem))
		}
	}
	return errs
}
