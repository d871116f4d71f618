package compile

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

var update = flag.Bool("update", false, "write what the transcripts should say")

// A transcript is testdata/NAME.yaml, ShardingConfigs and Pods as users write
// them, and testdata/NAME.out.yaml, what became of them.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".in.yaml"), func(t *testing.T) {
			configs, pods := read(t, file)
			got := transcript(t, Compile(configs, pods))
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
	configs, pods := read(t, "testdata/mixed.in.yaml")
	want := transcript(t, Compile(configs, pods))
	rapid.Check(t, func(rt *rapid.T) {
		c := rapid.Permutation(configs).Draw(rt, "configs")
		p := rapid.Permutation(pods).Draw(rt, "pods")
		require.Equal(rt, string(want), string(transcript(rt, Compile(c, p))))
	})
}

func TestVersionFollowsContent(t *testing.T) {
	configs, pods := read(t, "testdata/mixed.in.yaml")
	uid := types.UID("uid-operator-0")
	before := Compile(configs, pods).Policies[uid].Version
	require.Equal(t, before, Compile(configs, pods).Policies[uid].Version)
	for _, c := range configs {
		for i := range c.Spec.Limits {
			c.Spec.Limits[i].Selector = nil
		}
	}
	require.NotEqual(t, before, Compile(configs, pods).Policies[uid].Version)
}

// A pod that trusts the mesh alone was admitted as a member: whatever became of
// its configuration, it must not be let through as if there had been none.
func TestAMemberWithoutAConfigurationIsRefused(t *testing.T) {
	member := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "member", UID: "1",
		Labels:      map[string]string{v1alpha1.EnableProxyLabel: "true"},
		Annotations: map[string]string{v1alpha1.TrustAnnotation: v1alpha1.TrustMesh},
	}}
	other := member.DeepCopy()
	other.Name, other.UID = "other", "2"
	other.Annotations[v1alpha1.TrustAnnotation] = v1alpha1.TrustBoth

	r := Compile(nil, []*corev1.Pod{member, other})

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
	r := Compile(nil, []*corev1.Pod{pod})
	require.Equal(t, "a?b", r.Policies["1"].Workload)
	require.Empty(t, r.Policies["1"].Refuse)
}

func read(t require.TestingT, file string) (configs []*v1alpha1.ShardingConfig, pods []*corev1.Pod) {
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
		default:
			require.Fail(t, "unknown kind "+kind.Kind)
		}
	}
	return configs, pods
}

func transcript(t require.TestingT, r Result) []byte {
	type shard struct {
		Config    string
		Members   []string   `json:",omitempty"`
		Lock      string     `json:",omitempty"`
		Problem   *Problem   `json:",omitempty"`
		Conflicts []Conflict `json:",omitempty"`
	}
	out := struct {
		Shards   []shard
		Policies map[string]any
	}{Policies: map[string]any{}}
	for _, s := range r.Shards {
		v := shard{Config: s.Config.Namespace + "/" + s.Config.Name, Lock: s.Lock, Problem: s.Problem, Conflicts: s.Conflicts}
		for _, p := range s.Members {
			v.Members = append(v.Members, p.Name)
		}
		out.Shards = append(out.Shards, v)
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
