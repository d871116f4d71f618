package layout

import (
	"fmt"
	"math"
	"strconv"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// MaxShards is the maximum number of automatic shards of a root.
const MaxShards = 64

// Validate returns the errors of a root. For keys that would have no owner, or two, it names
// an example.
func Validate(root *v1alpha1.RootConfig, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, problem := range validation.IsDNS1123Subdomain(canaryName(root)) {
		errs = append(errs, field.Invalid(path.Child("prefix"), root.Prefix, "shards would be named like "+canaryName(root)+": "+problem))
	}
	if _, name := Target(root); name == "" || root.TargetRef != nil && root.TargetStatefulSet != "" {
		errs = append(errs, field.Required(path.Child("targetRef"), "name the operator's pods by one of targetRef and targetStatefulSet"))
	}
	if root.Canary == nil && root.Auto == nil {
		errs = append(errs, field.Required(path.Child("auto"), "set auto, canary, or both"))
	}
	if auto, path := root.Auto, path.Child("auto"); auto != nil {
		if auto.ShardingSize < 1 || auto.ShardingSize > MaxShards {
			errs = append(errs, field.Invalid(path.Child("shardingSize"), auto.ShardingSize, validation.InclusiveRangeError(1, MaxShards)))
		}
		if auto.EveryShardReplicas < 1 {
			errs = append(errs, field.Invalid(path.Child("everyShardReplicas"), auto.EveryShardReplicas, validation.InclusiveRangeError(1, math.MaxInt32)))
		}
	}
	if root.Key == v1alpha1.KeyObject {
		errs = append(errs, validateByObject(root, path)...)
	}
	if root.Canary == nil {
		return errs
	}
	if problems := validateCanary(root.Canary, path.Child("canary")); len(problems) > 0 {
		return append(errs, problems...)
	}
	return append(errs, validateRest(root, path)...)
}

// validateByObject returns the errors of settings that key: Object does not allow.
func validateByObject(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	if root.Canary != nil {
		errs = append(errs, field.Forbidden(path.Child("canary"), "objects are assigned by uid (key: Object), which leaves no namespaces to give to a canary: remove canary, or choose key: Namespace"))
	}
	if root.Method == v1alpha1.MethodLabels {
		errs = append(errs, field.NotSupported(path.Child("method"), root.Method, []v1alpha1.Method{v1alpha1.MethodAuto, v1alpha1.MethodServerSide, v1alpha1.MethodFilter}))
	}
	return errs
}

// validateRest returns the errors of a valid canary together with the remaining keys.
func validateRest(root *v1alpha1.RootConfig, path *field.Path) (errs field.ErrorList) {
	taken := canary(root)
	rest := sharding.All().Minus(taken)
	if root.Auto != nil && rest.Empty() {
		errs = append(errs, field.Invalid(path.Child("canary", "inShardHash"), root.Canary.InShardHash,
			fmt.Sprintf("all %d buckets are the canary's, so that the shards of auto would own nothing: even namespace default would be the canary's. Leave out a bucket, or remove auto", sharding.Buckets)))
	}
	if root.Method == v1alpha1.MethodServerSide {
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
	if len(c.InNamespaces)+len(c.InShardHash) == 0 {
		errs = append(errs, field.Required(path.Child("inNamespaces"), "list inNamespaces, inShardHash, or both: the canary would own nothing"))
	}
	seen := map[string]bool{}
	for i, name := range c.InNamespaces {
		path := path.Child("inNamespaces").Index(i)
		if seen[name] {
			errs = append(errs, field.Duplicate(path, name))
		}
		seen[name] = true
		for _, problem := range validation.IsDNS1123Label(name) {
			errs = append(errs, field.Invalid(path, name, problem))
		}
	}
	clear(seen)
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
