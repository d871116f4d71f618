package dialect

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

var update = flag.Bool("update", false, "write the transcripts")

// A transcript is testdata/NAME.in.yaml, objects as users write them, and
// testdata/NAME.out.yaml, the translation of the last of them.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	require.NoError(t, err)
	require.Len(t, files, 7)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".in.yaml"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			first, again := translate(t, text), translate(t, text)
			require.Equal(t, first, again)
			if first.Config != nil {
				require.Empty(t, validate.Config(first.Config))
			}
			for _, b := range first.Breakers {
				require.Empty(t, validate.Breaker(b))
			}
			got, err := yaml.Marshal(first)
			require.NoError(t, err)
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

// translate decodes objects, requires that it knows all fields and that the schemas of the kinds
// accept them, and translates the last one.
func translate(t *testing.T, text []byte) (out Translation) {
	t.Helper()
	var errs field.ErrorList
	var apps []*kruise.VirtualApp
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var meta metav1.TypeMeta
		require.NoError(t, yaml.Unmarshal(doc, &meta))
		switch meta.GroupVersionKind() {
		case kruise.GroupVersion.WithKind("VirtualApp"):
			app := decode[kruise.VirtualApp](t, doc, "ctrlmesh.kruise.io_virtualapps")
			apps = append(apps, app)
			out, errs = VirtualApp(app)
		case kruise.GroupVersion.WithKind("TrafficPolicy"):
			out, errs = TrafficPolicy(decode[kruise.TrafficPolicy](t, doc, "ctrlmesh.kruise.io_trafficpolicies"), apps)
		case kridge.GroupVersion.WithKind("ShardingConfig"):
			out, errs = ShardingConfig(decode[kridge.ShardingConfig](t, doc, "kridge.kusionstack.io_shardingconfigs"))
		default: // the seed that needs no translation
			out, errs = Translation{Config: decode[v1alpha1.ShardingConfig](t, doc, "ctrlmesh.kusionstack.io_shardingconfigs")}, nil
		}
		require.Empty(t, errs)
	}
	return out
}

func decode[T any](t *testing.T, doc []byte, crd string) *T {
	t.Helper()
	out := new(T)
	require.NoError(t, yaml.UnmarshalStrict(doc, out))
	fields := map[string]any{}
	text, err := yaml.YAMLToJSON(doc)
	require.NoError(t, err)
	require.NoError(t, utiljson.Unmarshal(text, &fields)) // integers as such
	require.Empty(t, schemaOf(t, crd).admit(fields))
	return out
}
