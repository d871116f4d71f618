package layout

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

func pod(name string, age int, hash string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0)),
		Labels: map[string]string{templateHash: hash},
	}}
}

func members(shardOf map[string]string) map[string]handover.Member {
	out := map[string]handover.Member{}
	for uid, shard := range shardOf {
		out[uid] = handover.Member{UID: uid, Name: uid, Shard: shard}
	}
	return out
}

func deployment(root *v1alpha1.RootConfig) *v1alpha1.RootConfig {
	root = root.DeepCopy()
	root.TargetStatefulSet = ""
	root.TargetRef = &v1alpha1.TargetRef{APIVersion: "apps/v1", Kind: Deployment, Name: "op"}
	return root
}

func TestShards(t *testing.T) {
	root := withCanary(auto(2), []string{"a"})
	root.Auto.EveryShardReplicas = 3
	require.Equal(t, []Shard{
		{Name: "op-0-canary", Pinned: true, Replicas: 1}, {Name: "op-1-normal", Replicas: 3}, {Name: "op-2-normal", Replicas: 3},
	}, Shards(root))
	root.Auto = nil
	require.Equal(t, []Shard{{Name: "op-0-canary", Pinned: true, Replicas: 1}, {Name: "op-1-normal"}}, Shards(root))
}

func TestSelects(t *testing.T) {
	yes := true
	owned := func(version, kind, name, hash string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "ConfigMap", Name: "op"},
			{APIVersion: version, Kind: kind, Name: name, Controller: &yes},
		}}}
		if hash != "" {
			p.Labels = map[string]string{templateHash: hash}
		}
		return p
	}
	set, dep := auto(2), deployment(auto(2))
	for _, c := range []struct {
		pod      *corev1.Pod
		set, dep bool
	}{
		{owned("apps/v1", "StatefulSet", "op", ""), true, false},
		{owned("apps/v1", "StatefulSet", "op-2", ""), false, false},
		{owned("apps.example.com/v1", "StatefulSet", "op", ""), false, false},
		{owned("apps/v1", "ReplicaSet", "op-5d4f", "5d4f"), false, true},
		{owned("apps/v1", "ReplicaSet", "op-x-5d4f", "5d4f"), false, false},
		{owned("apps/v1", "ReplicaSet", "op-5d4f", ""), false, false},
		{owned("apps/v1", "ReplicaSet", "op", ""), false, false},
		{&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "op-0"}}, false, false},
	} {
		require.Equal(t, c.set, Selects(set)(c.pod), "%v", c.pod.OwnerReferences)
		require.Equal(t, c.dep, Selects(dep)(c.pod), "%v", c.pod.OwnerReferences)
	}
}

func TestPlaceByOrdinal(t *testing.T) {
	root := withCanary(auto(2), []string{"a"})
	root.Auto.EveryShardReplicas = 2
	var pods []*corev1.Pod
	for i := range 7 {
		pods = append(pods, pod(fmt.Sprintf("op-%d", i), 0, ""))
	}
	pods[2].Status.Phase = corev1.PodFailed
	now := metav1.Now()
	pods[3].DeletionTimestamp = &now
	pods = append(pods, pod("op-x", 0, ""), pod("other-1", 0, ""))

	placed, outdated := Place(root, 0, pods, members(map[string]string{"op-4": "op-2-normal"}))
	require.Equal(t, map[string]string{"op-0": "op-0-canary", "op-1": "op-1-normal"}, placed)
	require.Empty(t, outdated)

	placed, outdated = Place(root, 0, pods, members(map[string]string{"op-1": "op-0-canary", "op-5": "op-3-normal"}))
	require.Equal(t, map[string]string{"op-0": "op-0-canary", "op-4": "op-2-normal"}, placed)
	require.Equal(t, []string{"op-1", "op-5"}, outdated)

	root.Auto = nil
	placed, _ = Place(root, 0, pods, nil)
	require.Equal(t, map[string]string{
		"op-0": "op-0-canary", "op-1": "op-1-normal", "op-4": "op-1-normal", "op-5": "op-1-normal", "op-6": "op-1-normal",
	}, placed)

	yes := true
	root.Disable = &yes
	placed, outdated = Place(root, 0, pods, members(map[string]string{"op-1": "op-1-normal"}))
	require.Empty(t, placed)
	require.Equal(t, []string{"op-1"}, outdated)
}

func TestPlaceByLack(t *testing.T) {
	root := deployment(withCanary(auto(2), []string{"a"}))
	root.Auto.EveryShardReplicas = 2
	pods := []*corev1.Pod{pod("f", 1, "x"), pod("a", 9, "x"), pod("b", 8, "x"), pod("c", 7, "x"), pod("d", 6, "x"), pod("e", 5, "x")}
	placed, outdated := Place(root, 0, pods, nil)
	require.Equal(t, map[string]string{
		"a": "op-0-canary", "b": "op-1-normal", "c": "op-2-normal", "d": "op-1-normal", "e": "op-2-normal", "f": "op-0-canary",
	}, placed, "the oldest first")
	require.Empty(t, outdated)

	placed, _ = Place(root, 0, pods, members(map[string]string{"a": "op-2-normal", "b": "op-2-normal"}))
	require.NotContains(t, placed, "a", "who is somewhere stays")
	require.Equal(t, "op-0-canary", placed["c"])
	require.Equal(t, "op-1-normal", placed["d"])

	root.Auto = nil
	placed, _ = Place(root, 0, pods, nil)
	require.Equal(t, map[string]string{
		"a": "op-0-canary", "b": "op-1-normal", "c": "op-1-normal", "d": "op-1-normal", "e": "op-1-normal", "f": "op-1-normal",
	}, placed)
}

// A rollout that creates before it deletes leaves nobody without a shard, and no
// shard without somebody.
func TestPlaceInARollout(t *testing.T) {
	root := deployment(auto(2))
	shardOf := map[string]string{"old-1": "op-1-normal", "old-2": "op-2-normal"}
	placed, outdated := Place(root, 0, []*corev1.Pod{pod("old-1", 9, "x"), pod("old-2", 9, "x"), pod("new-1", 1, "y")}, members(shardOf))
	require.Equal(t, map[string]string{"new-1": "op-1-normal"}, placed)
	require.Empty(t, outdated)
	shardOf["new-1"] = "op-1-normal"
	placed, outdated = Place(root, 0, []*corev1.Pod{pod("old-2", 9, "x"), pod("new-1", 2, "y"), pod("new-2", 1, "y")}, members(shardOf))
	require.Equal(t, map[string]string{"new-2": "op-2-normal"}, placed)
	require.Empty(t, outdated)
}

func TestAPodWithoutANodeComesLast(t *testing.T) {
	running, pending := pod("running", 1, "x"), pod("pending", 9, "x")
	running.Spec.NodeName = "n"
	placed, _ := Place(deployment(auto(2)), 0, []*corev1.Pod{pod("a", 10, "x"), pending, running}, members(map[string]string{"a": "op-1-normal"}))
	require.Equal(t, "op-2-normal", placed["running"])
	require.Equal(t, "op-1-normal", placed["pending"])
}

func TestPodsAreFreedForShardsWithNobody(t *testing.T) {
	root := deployment(auto(3))
	pods := []*corev1.Pod{pod("a", 9, "x"), pod("b", 8, "x"), pod("c", 7, "x")}
	shardOf := map[string]string{"a": "op-1-normal", "b": "op-1-normal", "c": "op-2-normal"}
	assigned := members(shardOf)
	placed, outdated := Place(root, 0, pods, assigned)
	require.Empty(t, placed)
	require.Equal(t, []string{"b"}, outdated)

	b := assigned["b"]
	b.Stale = true
	assigned["b"] = b
	_, outdated = Place(root, 0, pods, assigned)
	require.Empty(t, outdated, "one is on its way")

	placed, outdated = Place(root, 0, []*corev1.Pod{pods[0], pods[2], pod("d", 1, "x")}, assigned)
	require.Equal(t, map[string]string{"d": "op-3-normal"}, placed)
	require.Empty(t, outdated)

	_, outdated = Place(deployment(auto(1)), 0, pods, members(shardOf))
	require.Equal(t, []string{"c"}, outdated, "its shard is no more")
}

// The successor of a member that was evicted from one shard must not join another whose stale
// member still acts: without a lock, both would act on the same keys.
func TestSuccessorComesBeforeStaleMembers(t *testing.T) {
	root := deployment(auto(3))
	root.Auto.EveryShardReplicas = 1
	assigned := members(map[string]string{"a": "op-1-normal", "c": "op-3-normal"})
	a := assigned["a"]
	a.Stale = true
	assigned["a"] = a
	placed, _ := Place(root, 0, []*corev1.Pod{pod("a", 3, "v1"), pod("c", 2, "v1"), pod("d", 1, "v1")}, assigned)
	require.Equal(t, map[string]string{"d": "op-2-normal"}, placed)
}

func TestPodsAreFreedForShardsThatLackSome(t *testing.T) {
	root := deployment(auto(2))
	root.Auto.EveryShardReplicas = 2
	pods := []*corev1.Pod{pod("a", 9, "x"), pod("b", 8, "x"), pod("c", 7, "x"), pod("d", 6, "x")}
	_, outdated := Place(root, 0, pods, members(map[string]string{"a": "op-1-normal", "b": "op-1-normal", "c": "op-1-normal", "d": "op-2-normal"}))
	require.Equal(t, []string{"c"}, outdated)

	_, outdated = Place(root, 0, pods[:3], members(map[string]string{"a": "op-1-normal", "b": "op-1-normal", "c": "op-2-normal"}))
	require.Empty(t, outdated, "nobody has one too many")
}

func TestValidate(t *testing.T) {
	check := func(change func(*v1alpha1.RootConfig)) string {
		root := withCanary(auto(2), []string{"a"}, 1, 2)
		change(root)
		return fmt.Sprint(Validate(root, field.NewPath("spec", "root")).ToAggregate())
	}
	require.Equal(t, "<nil>", check(func(*v1alpha1.RootConfig) {}))
	for says, change := range map[string]func(*v1alpha1.RootConfig){
		"spec.root.prefix: Invalid":                    func(r *v1alpha1.RootConfig) { r.Prefix = "Op" },
		"spec.root.targetRef: Required":                func(r *v1alpha1.RootConfig) { r.TargetStatefulSet = "" },
		"spec.root.auto: Required":                     func(r *v1alpha1.RootConfig) { r.Auto, r.Canary = nil, nil },
		"spec.root.auto.shardingSize: Invalid":         func(r *v1alpha1.RootConfig) { r.Auto.ShardingSize = 65 },
		"spec.root.auto.everyShardReplicas: Invalid":   func(r *v1alpha1.RootConfig) { r.Auto.EveryShardReplicas = 0 },
		"spec.root.canary: Forbidden":                  func(r *v1alpha1.RootConfig) { r.Key = v1alpha1.KeyObject },
		"spec.root.canary.replicas: Required":          func(r *v1alpha1.RootConfig) { r.Canary.Replicas = nil },
		"spec.root.canary.inNamespaces[1]: Duplicate":  func(r *v1alpha1.RootConfig) { r.Canary.InNamespaces = []string{"a", "a"} },
		"spec.root.canary.inNamespaces[0]: Invalid":    func(r *v1alpha1.RootConfig) { r.Canary.InNamespaces = []string{"a.b"} },
		"spec.root.canary.inShardHash[0]: Invalid":     func(r *v1alpha1.RootConfig) { r.Canary.InShardHash = []string{"32"} },
		"spec.root.canary.inShardHash[1]: Duplicate":   func(r *v1alpha1.RootConfig) { r.Canary.InShardHash = []string{"3", "3"} },
		"a shardSelector knows neither buckets":        func(r *v1alpha1.RootConfig) { r.Method = v1alpha1.MethodServerSide },
		"even namespace default would be the canary's": func(r *v1alpha1.RootConfig) { r.Canary = withCanary(r, nil, everyBucket()...).Canary },
		"spec.root.method: Unsupported value: \"Labels\"": func(r *v1alpha1.RootConfig) {
			r.Canary, r.Key, r.Method = nil, v1alpha1.KeyObject, v1alpha1.MethodLabels
		},
	} {
		require.Contains(t, check(change), says)
	}
	require.Equal(t, "<nil>", check(func(r *v1alpha1.RootConfig) {
		r.Canary.InShardHash, r.Method = nil, v1alpha1.MethodServerSide
	}))
}

func TestClustersAreDividedByName(t *testing.T) {
	root := auto(2)
	root.Key = v1alpha1.KeyCluster
	weights := Weights{"m1": 1, "m2": 1, "m3": 1, "m4": 1}
	owned := func(scopes map[string]sharding.Scope) map[string]int {
		out := map[string]int{}
		for shard, scope := range scopes {
			for name := range weights {
				if scope.Owns(name) {
					out[shard]++
				}
			}
		}
		return out
	}
	require.Empty(t, Validate(root, field.NewPath("spec", "root")))
	require.Equal(t, map[string]int{"op-1-normal": 2, "op-2-normal": 2}, owned(First(root, weights)))

	root.Canary = &v1alpha1.CanaryConfig{Replicas: new(int32(1)), InClusters: []string{"m2"}}
	require.Empty(t, Validate(root, field.NewPath("spec", "root")))
	scopes := First(root, weights)
	require.True(t, scopes["op-0-canary"].Owns("m2"))
	require.Equal(t, 1, owned(scopes)["op-0-canary"])

	for says, change := range map[string]func(*v1alpha1.RootConfig){
		"spec.root.subsets: Forbidden: clusters are assigned by their names": func(r *v1alpha1.RootConfig) {
			r.TargetSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
		},
		"spec.root.canary: Forbidden: clusters are assigned by their names": func(r *v1alpha1.RootConfig) { r.Canary.InNamespaces = []string{"a"} },
		"spec.root.canary.inClusters: Forbidden: it requires key: Cluster":  func(r *v1alpha1.RootConfig) { r.Key = v1alpha1.KeyNamespace },
		"spec.root.canary.inClusters[0]: Invalid":                           func(r *v1alpha1.RootConfig) { r.Canary.InClusters = []string{"A"} },
		"spec.root.method: Unsupported value: \"ServerSide\"":               func(r *v1alpha1.RootConfig) { r.Method = v1alpha1.MethodServerSide },
	} {
		wrong := root.DeepCopy()
		change(wrong)
		require.ErrorContains(t, Validate(wrong, field.NewPath("spec", "root")).ToAggregate(), says)
	}
}

func everyBucket() (out []int) {
	for b := range 32 {
		out = append(out, b)
	}
	return out
}

// A StatefulSet may count from another ordinal than 0 (spec.ordinals.start).
func TestPlaceBeginsAtTheFirstOrdinal(t *testing.T) {
	placed, outdated := Place(auto(2), 5, []*corev1.Pod{pod("op-4", 1, ""), pod("op-5", 1, ""), pod("op-6", 2, ""), pod("op-7", 2, "")}, nil)
	require.Equal(t, map[string]string{"op-5": "op-1-normal", "op-6": "op-2-normal"}, placed)
	require.Empty(t, outdated)
}
