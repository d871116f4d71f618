package compile

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/origin"
)

var update = flag.Bool("update", false, "write what the transcripts should say")

// A transcript is testdata/NAME.in.yaml, ShardingConfigs, CircuitBreakers,
// FaultInjections, Namespaces and Pods as users write them at 12:00 on 2030-01-01 and what is known of roots, and testdata/NAME.out.yaml, what became of them.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".in.yaml"), func(t *testing.T) {
			configs, pods, roots, rules := read(t, file)
			got := transcript(t, Compile(configs, pods, roots, rules))
			out := strings.TrimSuffix(file, ".in.yaml") + ".out.yaml"
			if *update {
				require.NoError(t, os.WriteFile(out, got, 0o644))
			}
			want, err := os.ReadFile(out)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got))
		})
	}
}

// What comes out does not depend on the order of what goes in.
func TestOrderDoesNotMatter(t *testing.T) {
	for _, file := range []string{"testdata/mixed.in.yaml", "testdata/root.in.yaml", "testdata/traffic.in.yaml"} {
		configs, pods, roots, rules := read(t, file)
		want := transcript(t, Compile(configs, pods, roots, rules))
		rapid.Check(t, func(rt *rapid.T) {
			c := rapid.Permutation(configs).Draw(rt, "configs")
			p := rapid.Permutation(pods).Draw(rt, "pods")
			r := rules
			r.Breakers = rapid.Permutation(rules.Breakers).Draw(rt, "breakers")
			r.Injections = rapid.Permutation(rules.Injections).Draw(rt, "injections")
			r.NoFaults = rapid.Permutation(rules.NoFaults).Draw(rt, "no faults")
			require.Equal(rt, string(want), string(transcript(rt, Compile(c, p, roots, r))))
		})
	}
}

func TestVersionFollowsContent(t *testing.T) {
	configs, pods, _, _ := read(t, "testdata/mixed.in.yaml")
	uid := types.UID("uid-operator-0")
	before := Compile(configs, pods, nil, Rules{}).Policies[uid].Version
	require.Equal(t, before, Compile(configs, pods, nil, Rules{}).Policies[uid].Version)
	for _, c := range configs {
		for i := range c.Spec.Limits {
			c.Spec.Limits[i].Selector = nil
		}
	}
	require.NotEqual(t, before, Compile(configs, pods, nil, Rules{}).Policies[uid].Version)
}

// A pod that trusts the mesh alone was admitted as a member: whatever became of
// its configuration, it must not be let through as if there had been none.
func TestRequestTimeoutIsSentToHandWrittenShards(t *testing.T) {
	config := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "c"}}
	config.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	config.Spec.Limits = []v1alpha1.ObjectLimiter{{RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"configmaps"}}}, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p",
		Labels: map[string]string{"a": "b", v1alpha1.EnableProxyLabel: "true"}, Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh}}}
	policy := Compile([]*v1alpha1.ShardingConfig{config}, []*corev1.Pod{pod}, nil, Rules{RequestTimeout: 2 * time.Minute}).Policies["p"]
	require.EqualValues(t, 120, policy.GetSharding().GetRequestTimeoutSeconds(), policy.GetRefuse())
}

func TestAMemberWithoutAConfigurationIsRefused(t *testing.T) {
	member := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "member", UID: "1",
		Labels:      map[string]string{v1alpha1.EnableProxyLabel: "true"},
		Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
	}}
	other := member.DeepCopy()
	other.Name, other.UID = "other", "2"
	other.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth

	r := Compile(nil, []*corev1.Pod{member, other}, nil, Rules{})

	require.Contains(t, r.Policies["1"].Refuse, "no ShardingConfig selects it")
	require.Empty(t, r.Policies["2"].Refuse)
	require.NotEqual(t, "", r.Policies["1"].Version)
}

// Nobody checks an owner's name. What it holds must not stop the manager.
func TestAnOwnersNameMayBeAnything(t *testing.T) {
	yes := true
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "pod", UID: "1",
		Labels:          map[string]string{v1alpha1.EnableProxyLabel: "true"},
		OwnerReferences: []metav1.OwnerReference{{Kind: "Job", Name: "a\xffb", Controller: &yes}},
	}}
	r := Compile(nil, []*corev1.Pod{pod}, nil, Rules{})
	require.Equal(t, "a?b", r.Policies["1"].Workload)
	require.Empty(t, r.Policies["1"].Refuse)

	pod.OwnerReferences[0].Name = strings.Repeat("x", 1<<20)
	require.Len(t, Workload(pod), 253, "it is in each series of the pod's agent")
}

// A pod may go past the proxy only where its configuration says so, and only if
// its clients could verify the apiserver there.
func TestWhoMayGoPastTheProxy(t *testing.T) {
	config := func(change func(*v1alpha1.ShardingConfigSpec)) *v1alpha1.ShardingConfig {
		c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}}
		c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"shard": "0"}}
		c.Spec.Limits = []v1alpha1.ObjectLimiter{{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}}
		change(&c.Spec)
		return c
	}
	closed := config(func(*v1alpha1.ShardingConfigSpec) {})
	open := config(func(s *v1alpha1.ShardingConfigSpec) { s.FailurePolicy = v1alpha1.FailOpen })
	off := config(func(s *v1alpha1.ShardingConfigSpec) { s.TokenBinding = v1alpha1.TokenBindingOff })
	pass := config(func(s *v1alpha1.ShardingConfigSpec) {
		s.ClientCertificates, s.Limits = v1alpha1.ClientCertificatesPassthrough, nil
	})
	both := config(func(s *v1alpha1.ShardingConfigSpec) { s.ClientCertificates = v1alpha1.ClientCertificatesPassthrough })
	for _, c := range []struct {
		what           string
		config         *v1alpha1.ShardingConfig
		trust, capture string
		want           *meshv1.PodPolicy // the fields that matter
		sharded        bool
	}{
		{"closed", closed, v1alpha1.TrustMesh, "", &meshv1.PodPolicy{}, true},
		{"closed, admitted before", closed, v1alpha1.TrustBoth, "", &meshv1.PodPolicy{}, true},
		{"open", open, v1alpha1.TrustBoth, "", &meshv1.PodPolicy{FailOpen: true}, true},
		{"open, by iptables", open, v1alpha1.TrustBoth, v1alpha1.CaptureIPTables, &meshv1.PodPolicy{FailOpen: true}, true},
		{"open, but trusts the mesh alone", open, v1alpha1.TrustMesh, "", &meshv1.PodPolicy{}, true},
		{"open, never admitted", open, "", "", &meshv1.PodPolicy{}, true},
		{"any token", off, v1alpha1.TrustMesh, "", &meshv1.PodPolicy{AnyToken: true}, true},
		{"passthrough", pass, v1alpha1.TrustBoth, "", &meshv1.PodPolicy{Passthrough: true}, false},
		{"passthrough, but trusts the mesh alone", pass, v1alpha1.TrustMesh, "", &meshv1.PodPolicy{}, false},
		{"passthrough, but by address", pass, v1alpha1.TrustBoth, v1alpha1.CaptureAddress, &meshv1.PodPolicy{}, false},
		{"passthrough of shards", both, v1alpha1.TrustBoth, "", &meshv1.PodPolicy{Refuse: "ShardingConfig ns/c: spec.clientCertificates: Passthrough leaves requests unread, so nothing can be divided: remove spec.limits and spec.controller, or choose Refuse"}, false},
		{"no configuration", nil, v1alpha1.TrustBoth, "", &meshv1.PodPolicy{FailOpen: true, AnyToken: true}, false},
		{"no configuration, never admitted", nil, "", "", &meshv1.PodPolicy{AnyToken: true}, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: "pod", UID: "1",
				Labels:      map[string]string{v1alpha1.EnableProxyLabel: "true", "shard": "0"},
				Annotations: map[string]string{v1alpha1.TrustAnnotation: c.trust, v1alpha1.CaptureAnnotation: c.capture},
			}}
			var configs []*v1alpha1.ShardingConfig
			if c.config != nil {
				configs = append(configs, c.config)
			}
			got := Compile(configs, []*corev1.Pod{pod}, nil, Rules{}).Policies["1"]
			require.Equal(t, c.sharded, got.Sharding != nil)
			c.want.Uid, c.want.Namespace, c.want.Name, c.want.Workload = "1", "ns", "pod", "pod"
			c.want.Version, c.want.Sharding = got.Version, got.Sharding
			require.True(t, proto.Equal(c.want, got.PodPolicy), "%v", got)
		})
	}
}

func read(t require.TestingT, file string) (configs []*v1alpha1.ShardingConfig, pods []*corev1.Pod, roots map[origin.Name]Root, rules Rules) {
	rules.Now = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	roots = map[origin.Name]Root{}
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	for doc := range bytes.SplitSeq(data, []byte("\n---\n")) {
		var kind struct{ Kind string }
		require.NoError(t, yaml.Unmarshal(doc, &kind))
		switch kind.Kind {
		case "ShardingConfig":
			c := &v1alpha1.ShardingConfig{}
			require.NoError(t, yaml.UnmarshalStrict(doc, c))
			configs = append(configs, c)
		case "Pod":
			p := &corev1.Pod{}
			require.NoError(t, yaml.UnmarshalStrict(doc, p))
			p.UID = types.UID("uid-" + p.Name)
			pods = append(pods, p)
		case "CircuitBreaker":
			c := &v1alpha1.CircuitBreaker{}
			require.NoError(t, yaml.UnmarshalStrict(doc, c))
			rules.Breakers = append(rules.Breakers, c)
		case "FaultInjection":
			f := &v1alpha1.FaultInjection{}
			require.NoError(t, yaml.UnmarshalStrict(doc, f))
			rules.Injections = append(rules.Injections, f)
		case "Namespace":
			n := &corev1.Namespace{}
			require.NoError(t, yaml.UnmarshalStrict(doc, n))
			if ForbidsFaults(n) {
				rules.NoFaults = append(rules.NoFaults, n.Name)
			}
		case "State":
			name, root := readState(t, doc)
			roots[origin.Name{Kind: origin.Native.GroupKind(), NamespacedName: name}] = root
		default:
			require.Fail(t, "unknown kind "+kind.Kind)
		}
	}
	return configs, pods, roots, rules
}

// readState reads what is known of a root, written as in its status.
func readState(t require.TestingT, doc []byte) (types.NamespacedName, Root) {
	var in struct {
		Kind       string
		Root       types.NamespacedName
		Namespaces []string
		Shards     map[string]struct {
			Serial       int64
			Held, Target []string
		}
		Members map[string]handover.Member
		Locks   []v1alpha1.LockStatus
		Standby string
	}
	require.NoError(t, yaml.UnmarshalStrict(doc, &in))
	parse := func(text []string) sharding.Scope {
		s, err := sharding.Parse(text)
		require.NoError(t, err)
		return s
	}
	out := Root{Namespaces: in.Namespaces, Locks: in.Locks, Standby: in.Standby, State: handover.State{Shards: map[string]handover.Shard{}, Members: in.Members}}
	for name, s := range in.Shards {
		out.State.Shards[name] = handover.Shard{Serial: s.Serial, Owned: parse(s.Held), Target: parse(s.Target)}
	}
	return in.Root, out
}

// ruled is a Ruling with the names of the pods.
func ruled(r Ruling) any {
	type target struct {
		Pod, Version string
		Message      string   `json:",omitempty"`
		Shared       []string `json:",omitempty"`
	}
	out := struct {
		Hash     string
		Problem  *Problem   `json:",omitempty"`
		Problems []*Problem `json:",omitempty"`
		Rules    []Rule     `json:",omitempty"`
		Targets  []target   `json:",omitempty"`
	}{Hash: r.Hash, Problem: r.Problem, Problems: r.Problems, Rules: r.Rules}
	for _, t := range r.Targets {
		out.Targets = append(out.Targets, target{t.Pod.Name, t.Version, t.Message, t.Shared})
	}
	return out
}

func transcript(t require.TestingT, r Result) []byte {
	type shard struct {
		Config    string     `json:",omitempty"`
		Root      string     `json:",omitempty"`
		Held      []string   `json:",omitempty"`
		Members   []string   `json:",omitempty"`
		Lock      string     `json:",omitempty"`
		Locks     []string   `json:",omitempty"`
		Problem   *Problem   `json:",omitempty"`
		Conflicts []Conflict `json:",omitempty"`
	}
	out := struct {
		Shards     map[string]shard
		Breakers   map[string]any `json:",omitempty"`
		Injections map[string]any `json:",omitempty"`
		Until      *time.Time     `json:",omitempty"`
		Policies   map[string]any
	}{Shards: map[string]shard{}, Breakers: map[string]any{}, Injections: map[string]any{}, Policies: map[string]any{}}
	for _, b := range r.Breakers {
		out.Breakers[b.Namespace+"/"+b.Name] = ruled(b.Ruling)
	}
	for _, i := range r.Injections {
		out.Injections[i.Namespace+"/"+i.Name] = ruled(i.Ruling)
	}
	if !r.Until.IsZero() {
		until := r.Until.UTC()
		out.Until = &until
	}
	for _, s := range r.Shards {
		v := shard{Held: s.Owned.Strings(), Lock: s.Lock, Problem: s.Problem, Conflicts: s.Conflicts}
		for _, l := range s.Locks {
			v.Locks = append(v.Locks, l.Namespace+"/"+l.UpstreamName)
		}
		if s.Config != nil {
			v.Config = s.Config.Namespace + "/" + s.Config.Name
		}
		if s.Root != nil {
			v.Root = s.Root.Name
		}
		for _, p := range s.Members {
			v.Members = append(v.Members, p.Name)
		}
		out.Shards[s.String()] = v
	}
	for uid, p := range r.Policies {
		data, err := protojson.Marshal(p.PodPolicy)
		require.NoError(t, err)
		var v map[string]any
		require.NoError(t, yaml.Unmarshal(data, &v))
		v["node"] = p.Node
		out.Policies[string(uid)] = v
	}
	data, err := yaml.Marshal(out)
	require.NoError(t, err)
	return data
}

func TestPolicyAboveTheBoundRefusesItsPodAlone(t *testing.T) {
	long := strings.Repeat("n", 63)
	config := func(name string, namespaces int) *v1alpha1.ShardingConfig {
		c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		c.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
		values := make([]string, namespaces)
		for i := range values {
			values[i] = fmt.Sprintf("%s%07d", long[7:], i)
		}
		c.Spec.Limits = []v1alpha1.ObjectLimiter{{
			RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"pods"}}},
			Selector:        &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: v1alpha1.NamespaceLabel, Operator: metav1.LabelSelectorOpIn, Values: values}}},
		}}
		return c
	}
	pod := func(name string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Labels: map[string]string{"app": name, v1alpha1.EnableProxyLabel: "true"}}}
	}
	r := Compile([]*v1alpha1.ShardingConfig{config("large", 120_000), config("small", 10)}, []*corev1.Pod{pod("large"), pod("small")}, nil, Rules{})
	large, small := r.Policies["large"], r.Policies["small"]
	require.Contains(t, large.Refuse, "exceeds 8 MiB")
	require.Less(t, proto.Size(large.PodPolicy), maxRest)
	require.NotEmpty(t, large.Version)
	require.Empty(t, small.Refuse)
	require.NotNil(t, small.Sharding)
	require.Equal(t, []string{"large"}, r.Shards[0].TooLarge)
	require.Empty(t, r.Shards[1].TooLarge)
}

func TestTimeIsCountedToConfigurations(t *testing.T) {
	written := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "written"}, Spec: v1alpha1.ShardingConfigSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}}
	derived := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "derived", Labels: map[string]string{v1alpha1.RootLabel: "root"}}}
	var pods []*corev1.Pod
	for i, label := range []string{"b", "b", "c"} {
		pods = append(pods, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint(i), UID: types.UID(fmt.Sprint(i)), Labels: map[string]string{v1alpha1.EnableProxyLabel: "true", "a": label}}})
	}
	var now time.Duration
	took := Compile([]*v1alpha1.ShardingConfig{written, derived}, pods, nil, Rules{Elapsed: func() time.Duration {
		now += time.Second
		return now
	}}).Took
	require.Equal(t, map[types.NamespacedName]time.Duration{{Namespace: "ns", Name: "written"}: 3 * time.Second}, took, "itself and two pods")
}

func TestLimitsOfUnchangedConfigurationsAreKept(t *testing.T) {
	selector := func(value string) *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{v1alpha1.NamespaceLabel: value}}
	}
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}, Spec: v1alpha1.ShardingConfigSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}, Limits: []v1alpha1.ObjectLimiter{{Selector: selector("x")}, {Selector: selector("y")}},
	}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "p", Labels: map[string]string{v1alpha1.EnableProxyLabel: "true", "a": "b"}}}
	cache := &Cache{}
	owns := func(namespace string) (out []bool) {
		for _, l := range Compile([]*v1alpha1.ShardingConfig{c.DeepCopy()}, []*corev1.Pod{pod}, nil, Rules{Cache: cache}).Policies["p"].Sharding.Limits {
			scope, err := sharding.FromProto(l.Scope)
			require.NoError(t, err)
			out = append(out, scope.Owns(namespace))
		}
		return out
	}
	require.Equal(t, []bool{true, false}, owns("x"))
	kept := cache.limits[origin.Of(c)].limits
	require.Equal(t, []bool{false, true}, owns("y"))
	require.Same(t, kept[0], cache.limits[origin.Of(c)].limits[0])
	c.Spec.Limits[0].Selector = selector("z")
	require.Equal(t, []bool{true, false}, owns("z"))
	require.NotSame(t, kept[0], cache.limits[origin.Of(c)].limits[0])
	require.Same(t, kept[1], cache.limits[origin.Of(c)].limits[1])
}

func TestNamespacesOfLimitsAreBounded(t *testing.T) {
	limit := func(prefix string) v1alpha1.ObjectLimiter {
		names := make([]string, maxNames)
		for i := range names {
			names[i] = fmt.Sprint(prefix, i)
		}
		return v1alpha1.ObjectLimiter{Namespaces: []v1alpha1.NamespaceMatch{{Names: names}}}
	}
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"}, Spec: v1alpha1.ShardingConfigSpec{Root: &v1alpha1.RootConfig{
		Prefix: "c", TargetStatefulSet: "c", Auto: &v1alpha1.AutoConfig{ShardingSize: 1, EveryShardReplicas: 1},
		ResourceSelector: []v1alpha1.ObjectLimiter{limit("a"), limit("a")},
	}}}
	require.Nil(t, Compile([]*v1alpha1.ShardingConfig{c}, nil, nil, Rules{}).Shards[0].Problem, "the same names count once")
	c.Spec.Limits = []v1alpha1.ObjectLimiter{{Namespaces: []v1alpha1.NamespaceMatch{{Names: []string{"b"}}}}}
	require.ErrorContains(t, Compile([]*v1alpha1.ShardingConfig{c}, nil, nil, Rules{}).Shards[0].Problem, "more than 100000 together: match fewer")
}
