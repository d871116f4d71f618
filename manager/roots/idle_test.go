package roots

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

func TestNobodyActs(t *testing.T) {
	t.Parallel()
	policy := func(namespace, node string) map[types.UID]compile.Policy {
		return map[types.UID]compile.Policy{"a": {Node: node, PodPolicy: &meshv1.PodPolicy{Namespace: namespace, Version: "2"}}}
	}
	for name, tt := range map[string]struct {
		policies map[types.UID]compile.Policy
		removed  []push.Removed
		version  string // in force
		nobody   bool
	}{
		"confirmed":              {policies: policy("ns", "node"), version: "2", nobody: true},
		"not confirmed":          {policies: policy("ns", "node"), version: "1"},
		"not scheduled":          {policies: policy("ns", ""), nobody: true},
		"another namespace":      {policies: policy("other", "node"), version: "1", removed: []push.Removed{{Namespace: "other"}}, nobody: true},
		"deleted pod":            {removed: []push.Removed{{Namespace: "ns", UID: "b"}}},
		"pod of which namespace": {removed: []push.Removed{{UID: "b"}}},
	} {
		observe := func(string, string) push.Observation { return push.Observation{Version: tt.version} }
		require.Equal(t, tt.nobody, NobodyActs("ns", tt.policies, tt.removed, observe), name)
	}
}
