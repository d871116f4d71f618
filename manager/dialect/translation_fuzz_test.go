package dialect

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

// FuzzTranslation translates any object, as objects that were created before a schema had all
// bounds.
func FuzzTranslation(f *testing.F) {
	files, err := filepath.Glob("testdata/*.in.yaml")
	require.NoError(f, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		object, err := yaml.YAMLToJSON(text)
		require.NoError(f, err)
		f.Add(object)
	}
	policy, app := readPolicy(f)
	object, err := json.Marshal(policy)
	require.NoError(f, err)
	f.Add(object)
	for _, text := range []string{`{}`, `{"spec":{"selector":{"matchLabels":{"/":"/"}},"subsets":[{}]}}`, `{"spec":{"targetVirtualApps":[{"name":"*","specificSubsets":["x",""]}],"rateLimiting":{"ratePolicies":[{"bucket":{}}]}}}`, `{"spec":{"root":{"canary":{},"auto":{"shardingSize":-1},"resourceSelector":[{"objectSelector":{}}]}}}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var v kruise.VirtualApp
		var p kruise.TrafficPolicy
		var s kridge.ShardingConfig
		if json.Unmarshal(text, &v) == nil {
			if out, errs := VirtualApp(&v); len(errs) == 0 {
				_ = validate.Config(out.Config)
			}
			_, _ = TrafficPolicy(policy, append([]*kruise.VirtualApp{app}, &v))
		}
		if json.Unmarshal(text, &p) == nil {
			out, _ := TrafficPolicy(&p, []*kruise.VirtualApp{app, &v})
			for _, b := range out.Breakers {
				_ = validate.Breaker(b)
			}
		}
		if json.Unmarshal(text, &s) == nil {
			if out, errs := ShardingConfig(&s); len(errs) == 0 {
				_ = validate.Config(out.Config)
			}
		}
	})
}
