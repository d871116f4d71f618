package trial

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each operator of the catalogue has its module and manifests that can be read.
func TestCatalogueIsComplete(t *testing.T) {
	for _, o := range Catalogue() {
		t.Run(o.Name, func(t *testing.T) {
			if o.Name != KubeControllerManager && o.Debian == "" {
				text, err := os.ReadFile(filepath.Join("..", "src", o.Name, "go.mod"))
				require.NoError(t, err)
				for _, image := range o.Images {
					require.Regexp(t, `(?m)^(tool )?\s*`+regexp.QuoteMeta(image.Package)+`$`, string(text), "it names the program as a tool")
				}
			}
			require.NotEmpty(t, o.Compared)
			for _, file := range []string{"workload.yaml", "passing.yaml"} {
				text, err := o.manifest(file)
				require.NoError(t, err)
				objects, err := decode(text)
				require.NoError(t, err)
				require.NotEmpty(t, objects, file)
				found := false
				for _, obj := range objects {
					found = found || obj.GroupVersionKind() == o.Tracked
				}
				require.True(t, found || o.Evicts, "%s has no object of the tracked kind", file)
			}
			require.True(t, o.Evicts || len(o.Patches) > 0, "nothing would change")
		})
	}
	sources, err := os.ReadDir("../src")
	require.NoError(t, err)
	require.Len(t, sources, len(Catalogue())-1, "modules that no operator uses")
}

func TestSummaryNeedsAllZeros(t *testing.T) {
	good := Result{Divided: true, AdoptionGapP99: 700}
	line, ok := Summary([]*Result{&good, {Divided: true, AdoptionGapP99: 900}})
	require.True(t, ok)
	require.Equal(t, "operators: tried=2 divided=2 two_owners=0 unreconciled=0 silent_stops=0 adoption_gap_p99_ms=900 differences=0 rbac_by_hand=0", line)
	for name, edit := range map[string]func(*Result){
		"two owners": func(r *Result) { r.TwoOwners = 1 }, "unreconciled": func(r *Result) { r.Unreconciled = 1 },
		"silent": func(r *Result) { r.SilentStops = 1 }, "different": func(r *Result) { r.Differences = 1 },
		"not divided": func(r *Result) { r.Divided = false }, "roles by hand": func(r *Result) { r.RBACByHand = 1 },
		"not completed": func(r *Result) { r.Problem = "timeout" },
	} {
		bad := good
		edit(&bad)
		_, ok := Summary([]*Result{&good, &bad})
		require.False(t, ok, name)
	}
	_, ok = Summary(nil)
	require.False(t, ok, "nothing was tried")
}
