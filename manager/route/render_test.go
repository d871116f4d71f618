package route

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

var hook = Service{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "hook"}, Selector: map[string]string{"app": "op"}, CA: []byte("ca")}

// pod returns a ready pod of the operator.
func pod(name, node, ip string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Labels: map[string]string{"app": "op"}},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{PodIP: ip, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

func config(name string, change func(*v1alpha1.ShardingConfigSpec)) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}}
	c.Spec.Webhook = &v1alpha1.WebhookConfig{CertDir: "/certs", Port: 9443}
	change(&c.Spec)
	return c
}

func shardOf(c, root *v1alpha1.ShardingConfig, name string, owned sharding.Scope, pods ...*corev1.Pod) compile.Shard {
	return compile.Shard{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, Config: c, Root: root, Owned: owned, Members: pods}
}

// rooted returns a root with two shards. One pod is in none.
func rooted(change func(*v1alpha1.ShardingConfigSpec)) compile.Result {
	c := config("op", func(s *v1alpha1.ShardingConfigSpec) {
		s.Root = &v1alpha1.RootConfig{}
		change(s)
	})
	one, two, surplus := pod("one", "n1", "192.0.2.1"), pod("two", "n2", "192.0.2.2"), pod("surplus", "n1", "192.0.2.3")
	unready := pod("unready", "n2", "192.0.2.4")
	unready.Status.Conditions[0].Status = corev1.ConditionFalse
	canary := sharding.Keys("a")
	return compile.Result{
		Shards: []compile.Shard{
			shardOf(c, nil, "op", sharding.Scope{}, one, two, surplus, unready),
			shardOf(nil, c, "op-one", canary, one),
			shardOf(nil, c, "op-two", sharding.All().Minus(canary), two, unready),
		},
		Policies: map[types.UID]compile.Policy{"one": {PodPolicy: &meshv1.PodPolicy{Sharding: &meshv1.Sharding{Shared: []*meshv1.SharedObjects{
			{Names: []string{"all"}, WriteAll: true}, {Names: []string{"read"}},
		}}}}},
	}
}

func TestWebhooksOfARoot(t *testing.T) {
	nodes := Render(rooted(func(s *v1alpha1.ShardingConfigSpec) {
		s.Limits = []v1alpha1.ObjectLimiter{
			{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"pods"}}}, Namespaces: []v1alpha1.NamespaceMatch{{Names: []string{"a", "b"}}}},
			{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"services"}}}},
		}
	}), []Service{hook, {NamespacedName: types.NamespacedName{Namespace: "ns", Name: "other"}, Selector: map[string]string{"app": "other"}, CA: []byte("x")}})
	require.Len(t, nodes, 2)
	require.Equal(t, map[string]string{"one": "op-one", "surplus": ""}, nodes["n1"].Webhooks[0].Pods)
	require.Equal(t, map[string]string{"two": "op-two", "unready": "op-two"}, nodes["n2"].Webhooks[0].Pods)
	w := nodes["n1"].Webhooks[0]
	require.Equal(t, "/certs", w.CertDir)
	require.EqualValues(t, 9443, w.Port)
	require.Equal(t, "op-two", w.DefaultShard)
	require.Len(t, w.Owners, 2)
	require.Equal(t, "op-one", w.Owners[0].Shard)
	require.Equal(t, sharding.Keys("a").Proto().String(), w.Owners[0].Scope.String())
	require.Len(t, w.Shared, 1)
	require.Equal(t, []string{"all"}, w.Shared[0].Names)
	require.Len(t, w.Limits, 1)
	require.Equal(t, []string{"pods"}, w.Limits[0].Resources[0].Resources)
	require.Len(t, w.Ready, 2)
	require.Equal(t, []string{"192.0.2.2"}, w.Ready[1].Addresses, "only those that are ready")
	require.Len(t, w.Authorities, 1)
	require.Equal(t, "hook.ns.svc", w.Authorities[0].ServerName)
	require.Equal(t, []byte("ca"), w.Authorities[0].Ca)
}

func TestVersionFollowsTheContent(t *testing.T) {
	same := func(*v1alpha1.ShardingConfigSpec) {}
	first, again := Render(rooted(same), []Service{hook}), Render(rooted(same), []Service{hook})
	require.Equal(t, first["n1"].Version, again["n1"].Version)
	require.NotEqual(t, first["n1"].Version, first["n2"].Version)
	other := hook
	other.CA = []byte("rotated")
	require.NotEqual(t, first["n1"].Version, Render(rooted(same), []Service{other})["n1"].Version)
}

func TestHandWrittenShardsBehindOneService(t *testing.T) {
	selector := func(*v1alpha1.ShardingConfigSpec) {}
	one, two, alone := pod("one", "n1", "192.0.2.1"), pod("two", "n1", "192.0.2.2"), pod("alone", "n1", "192.0.2.3")
	alone.Labels = nil
	limited := func(scopes ...sharding.Scope) compile.Policy {
		s := &meshv1.Sharding{}
		for _, scope := range scopes {
			s.Limits = append(s.Limits, &meshv1.Limit{Scope: scope.Proto()})
		}
		return compile.Policy{PodPolicy: &meshv1.PodPolicy{Sharding: s}}
	}
	a, b := sharding.Keys("a"), sharding.Keys("b")
	nodes := Render(compile.Result{
		Shards: []compile.Shard{
			shardOf(config("s1", selector), nil, "s1", sharding.Scope{}, one),
			shardOf(config("s2", selector), nil, "s2", sharding.Scope{}, two),
			shardOf(config("s3", selector), nil, "s3", sharding.Scope{}, alone),
		},
		Policies: map[types.UID]compile.Policy{"one": limited(a, a), "two": limited(b), "alone": limited(a, b)},
	}, []Service{hook})
	require.Len(t, nodes["n1"].Webhooks, 2)
	together, other := nodes["n1"].Webhooks[0], nodes["n1"].Webhooks[1]
	require.Equal(t, map[string]string{"one": "s1", "two": "s2"}, together.Pods)
	require.Len(t, together.Owners, 2)
	require.Empty(t, together.DefaultShard)
	require.Equal(t, map[string]string{"alone": "s3"}, other.Pods)
	require.Empty(t, other.Owners, "its limits have several scopes")
	require.Empty(t, other.Authorities)
}

func TestConfigurationsThatAreNotRouted(t *testing.T) {
	disable := true
	for name, change := range map[string]func(*v1alpha1.ShardingConfigSpec){
		"without webhook": func(s *v1alpha1.ShardingConfigSpec) { s.Webhook = nil },
		"dry run":         func(s *v1alpha1.ShardingConfigSpec) { s.DryRun = true },
		"withdrawn":       func(s *v1alpha1.ShardingConfigSpec) { s.Root.Disable = &disable },
	} {
		t.Run(name, func(t *testing.T) { require.Empty(t, Render(rooted(change), []Service{hook})) })
	}
	invalid := rooted(func(*v1alpha1.ShardingConfigSpec) {})
	invalid.Shards[0].Problem = &compile.Problem{}
	require.Empty(t, Render(invalid, []Service{hook}))
}

func TestLargestWebhooksOfANodeAreLeftOut(t *testing.T) {
	same := func(*v1alpha1.ShardingConfigSpec) {}
	services, c := []Service{}, compile.Result{}
	for name, size := range map[string]int{"small": 1 << 10, "large": 5 << 20, "larger": 6 << 20} {
		p := pod(name, "n1", "192.0.2.1")
		p.Labels = map[string]string{"app": name}
		c.Shards = append(c.Shards, shardOf(config(name, same), nil, name, sharding.Scope{}, p))
		services = append(services, Service{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, Selector: p.Labels, CA: make([]byte, size)})
	}
	w := Render(c, services)["n1"]
	require.LessOrEqual(t, proto.Size(w), meshv1.MaxPolicyBytes)
	require.Len(t, w.Webhooks, 3)
	for _, one := range w.Webhooks {
		if one.Pods["larger"] == "" {
			require.Empty(t, one.Problem)
			require.Len(t, one.Authorities, 1)
			continue
		}
		require.Contains(t, one.Problem, "6144 KiB")
		require.Empty(t, one.Authorities)
		require.Less(t, len(one.Problem), 500, "the status clips it")
	}
}

func TestScopeOfSeveralLimitsOccursOnce(t *testing.T) {
	limit := func(resource string, namespaces ...string) v1alpha1.ObjectLimiter {
		return v1alpha1.ObjectLimiter{
			RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{resource}}},
			Namespaces:      []v1alpha1.NamespaceMatch{{Names: namespaces}},
		}
	}
	w := Render(rooted(func(s *v1alpha1.ShardingConfigSpec) {
		s.Limits = []v1alpha1.ObjectLimiter{limit("pods", "a", "b"), limit("services", "a"), limit("secrets", "b", "a")}
	}), nil)["n1"].Webhooks[0]
	require.Len(t, w.Limits, 2)
	require.Len(t, w.Limits[0].Resources, 2)
	require.Equal(t, []string{"secrets"}, w.Limits[0].Resources[1].Resources)
	require.Equal(t, []string{"services"}, w.Limits[1].Resources[0].Resources)
}
