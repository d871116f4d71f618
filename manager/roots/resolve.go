package roots

import (
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

// Resolve adds, to the roots among configs, the names of the namespaces that they match. The
// result is why that failed, by uid: the shards of such a root keep what they own.
func Resolve(configs []*v1alpha1.ShardingConfig, namespaces map[string]labels.Set) (unresolved map[types.UID]error) {
	unresolved = map[types.UID]error{}
	for _, c := range configs {
		if c.Spec.Root == nil {
			continue
		}
		if err := layout.Resolve(&c.Spec, namespaces); err != nil {
			unresolved[c.UID] = err
		}
	}
	return unresolved
}
