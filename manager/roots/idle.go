package roots

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// NobodyActs reports whether no pod of a namespace acts by an earlier policy: agents have confirmed
// the current policies of all pods, and that they refuse the pods without one. removed must not be
// older than the policies.
func NobodyActs(namespace string, policies map[types.UID]compile.Policy, removed []push.Removed, observe func(node, uid string) push.Observation) bool {
	mayAct := func(p push.Removed) bool { return p.Namespace == namespace || p.Namespace == "" }
	return !slices.ContainsFunc(removed, mayAct) && !collect.Any(policies, func(uid types.UID, p compile.Policy) bool {
		return p.GetNamespace() == namespace && p.Node != "" && observe(p.Node, string(uid)).Version != p.GetVersion()
	})
}
