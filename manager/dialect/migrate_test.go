package dialect

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// ofDialects returns the objects of dialects in a file.
func ofDialects(t *testing.T, file string) (out []Object) {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var meta metav1.TypeMeta
		require.NoError(t, yaml.Unmarshal(doc, &meta))
		var o Object
		switch meta.GroupVersionKind() {
		case kruise.GroupVersion.WithKind("VirtualApp"):
			o = &kruise.VirtualApp{}
		case kruise.GroupVersion.WithKind("TrafficPolicy"):
			o = &kruise.TrafficPolicy{}
		case kridge.GroupVersion.WithKind("ShardingConfig"):
			o = &kridge.ShardingConfig{}
		default:
			continue
		}
		require.NoError(t, yaml.UnmarshalStrict(doc, o))
		out = append(out, o)
	}
	return out
}

// The native objects of each transcript can be applied: admission accepts them, and so does
// the schema. They have nothing that only a server sets.
func TestMigrationsCanBeApplied(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	require.NoError(t, err)
	for _, file := range files {
		in := ofDialects(t, file)
		if len(in) == 0 { // the seed of the native kind
			continue
		}
		m, err := Migrate(in...)
		require.NoError(t, err, file)
		require.NotEmpty(t, m.Objects, file)
		require.NotEmpty(t, m.Notes, file)
		names := map[string]bool{}
		for _, o := range m.Objects {
			require.False(t, names[o.GetName()], o.GetName())
			names[o.GetName()] = true
			require.Empty(t, o.GetUID())
			require.Zero(t, o.GetGeneration())
			text, err := yaml.Marshal(o)
			require.NoError(t, err)
			switch o := o.(type) {
			case *v1alpha1.ShardingConfig:
				require.Empty(t, validate.Config(o))
				decode[v1alpha1.ShardingConfig](t, text, "ctrlmesh.kusionstack.io_shardingconfigs")
			case *v1alpha1.CircuitBreaker:
				require.Empty(t, validate.Breaker(o))
				decode[v1alpha1.CircuitBreaker](t, text, "ctrlmesh.kusionstack.io_circuitbreakers")
			default:
				t.Fatalf("%T is no native kind", o)
			}
		}
	}
}

// A migration names the object that each note is about, and what the native object lacks.
func TestMigrationsNameWhatIsLeft(t *testing.T) {
	in := ofDialects(t, "testdata/virtualapp-all.in.yaml")
	in[0].SetAnnotations(map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "note": "kept"})
	in[0].SetLabels(map[string]string{v1alpha1.RootLabel: "forged"})
	in = append(in, &kridge.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "operator-demo", Name: "od-1-normal", Labels: map[string]string{kridge.RootLabel: "od"}}})
	m, err := Migrate(in...)
	require.NoError(t, err)
	require.Len(t, m.Objects, 1)
	require.Equal(t, map[string]string{"note": "kept"}, m.Objects[0].GetAnnotations())
	require.Empty(t, m.Objects[0].GetLabels())
	for _, about := range []string{
		"VirtualApp operator-demo/test-operator: spec.route.subRules[0].match[1].objectSelector: the lists of a subset are not narrowed by labels of objects",
		`VirtualApp operator-demo/test-operator: its pods were on the mesh because of its selector: add the label ctrlmesh.kusionstack.io/enable-proxy: "true" to the pod template`,
		"ShardingConfig of Kridge operator-demo/od-1-normal: left out, because Kridge derived it from ShardingConfig od, and the mesh derives its own: delete it",
	} {
		require.Contains(t, m.Notes, about)
	}
}

// Objects without a native form are named, with the reasons, and the others are migrated.
func TestMigrationsRefuseWhatAdmissionRefuses(t *testing.T) {
	good := ofDialects(t, "testdata/virtualapp-all.in.yaml")[0]
	bad, _ := good.DeepCopyObject().(*kruise.VirtualApp)
	bad.Name, bad.Spec.Selector = "bad", nil
	same := &kridge.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: good.GetNamespace(), Name: good.GetName()}}
	same.Spec.Selector = selector("a", "1")
	same.Spec.Limits = shard(selector("a", "1")).Spec.Limits
	m, err := Migrate(bad, good, same, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b"}})
	require.Len(t, m.Objects, 1)
	for _, about := range []string{
		"VirtualApp operator-demo/bad: spec.selector: Required value",
		"ShardingConfig of Kridge operator-demo/test-operator: a ShardingConfig of its name replaces VirtualApp operator-demo/test-operator: rename one of them",
		"*v1.Pod a/b is not an object of a dialect",
	} {
		require.ErrorContains(t, err, about)
	}
	require.Len(t, strings.Split(err.Error(), "\n"), 3)
}
