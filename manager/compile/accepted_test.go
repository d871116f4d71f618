package compile_test

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// Whatever the state of a root, agents can apply its policies: a handover waits for an agent
// that cannot for ever.
func TestAgentsAcceptAllPoliciesOfRoots(t *testing.T) {
	server, err := proxy.New(proxy.Config{
		Leaf:       func() (*tls.Certificate, error) { return nil, nil },
		Logger:     slog.New(slog.DiscardHandler),
		Registerer: prometheus.NewRegistry(),
	})
	require.NoError(t, err)
	const all = 1 << 8
	for set := range all {
		has := func(bit int) bool { return set&(1<<bit) != 0 }
		root := &v1alpha1.ShardingConfig{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op", UID: "root"},
			Spec: v1alpha1.ShardingConfigSpec{DryRun: has(0), Root: &v1alpha1.RootConfig{
				Disable: new(has(1)), Prefix: "op", TargetStatefulSet: "op", Auto: &v1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1},
				ResourceSelector: []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}}},
			}},
		}
		if has(2) {
			root.DeletionTimestamp = new(metav1.Now())
		}
		known := compile.Root{Undivided: has(3), State: handover.State{RolledBack: has(4), Shards: map[string]handover.Shard{"op-1-normal": {Serial: 7}}}}
		if has(5) {
			known.State.Members = map[string]handover.Member{"uid": {UID: "uid", Name: "op-0", Node: "node", Shard: "op-1-normal", Serial: 7}}
		}
		if has(6) {
			known.State.Shards["op-1-normal"] = handover.Shard{Serial: 7, Owned: sharding.All(), Target: sharding.All()}
		}
		if has(7) {
			known.Forgotten = map[string]bool{"uid": true}
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "op-0", UID: "uid", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true"},
			Annotations:     map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "op", Controller: new(true)}},
		}}
		policy := compile.Compile([]*v1alpha1.ShardingConfig{root}, []*corev1.Pod{pod}, map[origin.Name]compile.Root{origin.Of(root): known}, compile.Rules{}).Policies["uid"]
		_, err := server.Pod(proxy.PodInfo{UID: fmt.Sprint(set), Namespace: "ns", Name: "op-0"}, (&net.Dialer{}).DialContext).Apply(policy.PodPolicy)
		require.NoError(t, err, "%08b: %v", set, policy.PodPolicy)
	}
}
