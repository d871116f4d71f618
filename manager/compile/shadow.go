package compile

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

const (
	minWindow = time.Second
	maxWindow = 5 * time.Minute
)

// Shadows reports whether the pods of a configuration are a shadow. No write of theirs takes
// effect, so they may lead beside any other pod.
func Shadows(c *v1alpha1.ShardingConfig) bool { return c.Spec.Shadow != nil }

// shadowed returns the name of the shard of which a configuration is a shadow; empty for all others.
func shadowed(c *v1alpha1.ShardingConfig) string {
	if !Shadows(c) {
		return ""
	}
	return c.Spec.Shadow.Of
}

// Window returns how long a shadow waits for others to make its changes. The problem is empty if
// it is valid.
func Window(s *v1alpha1.Shadow) (window time.Duration, problem string) {
	window, err := time.ParseDuration(string(s.Window)) // the schema holds its syntax
	if err != nil || window < minWindow || window > maxWindow {
		return 0, fmt.Sprintf("must be from %s to %s, such as 30s", minWindow, maxWindow)
	}
	return window, ""
}

// shadow renders how writes of a shadow are compared; nil for other configurations.
func shadow(c *v1alpha1.ShardingConfig) (*meshv1.Shadow, *Problem) {
	if !Shadows(c) {
		return nil, nil
	}
	window, problem := Window(c.Spec.Shadow)
	if problem != "" {
		return nil, &Problem{v1alpha1.ReasonInvalid, "spec.shadow.window " + problem}
	}
	return &meshv1.Shadow{WindowNs: int64(window), IgnoredFields: c.Spec.Shadow.IgnoredFields}, nil
}

// shadow renders the sharding of a shadow of one of the root's shards; r is nil if no root has it. Until
// the shards act, the shadow sees nothing.
func (r *root) shadow(c *v1alpha1.ShardingConfig) (*meshv1.Sharding, *Problem) {
	of := c.Spec.Shadow.Of
	if r == nil {
		return nil, &Problem{v1alpha1.ReasonUnknownShard, fmt.Sprintf("no root in namespace %s has a shard %s, which spec.shadow.of names: correct the name, or wait until the root is divided", c.Namespace, of)}
	}
	if r.problem != nil {
		return nil, &Problem{r.problem.Reason, fmt.Sprintf("spec.shadow.of names a shard of %s: %s", origin.Describe(r.config), r.problem.Message)}
	}
	compared, problem := shadow(c)
	if problem != nil {
		return nil, problem
	}
	acts := r.State.Holds() && !r.State.RolledBack && r.dryRun == nil
	out := r.standby(fmt.Sprintf("shard %s does not act", of))
	if acts {
		out = r.memberSharding(sharedKey{shard: of})
	}
	out = proto.CloneOf(out)
	out.Shard, out.Shadow = c.Name, compared
	if acts {
		out.Locks = shardLocks(OperatorLocks(r.config, r.Locks), c.Name)
	}
	return out, nil
}
