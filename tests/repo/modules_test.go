package repo

import (
	"encoding/json"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestClusterIsBuiltFromTheSameVersions holds the modules of the tests' cluster to the
// versions of go.mod, so that a package that several programs need is compiled once.
func TestClusterIsBuiltFromTheSameVersions(t *testing.T) {
	own := required(t, "../..")
	for _, dir := range []string{"k8s", "coredns"} {
		for path, version := range required(t, "../cluster/src/"+dir) {
			// Kubernetes requires its own parts as v0.0.0 and replaces them.
			if want, ok := own[path]; ok && version != "v0.0.0" {
				assert.Equal(t, want, version, "run go get %s@%s in tests/cluster/src/%s", path, want, dir)
			}
		}
	}
}

// required returns the versions that a module requires by their paths.
func required(t *testing.T, dir string) map[string]string {
	t.Helper()
	cmd := exec.Command("go", "mod", "edit", "-json")
	cmd.Dir = dir
	out, err := cmd.Output()
	require.NoError(t, err)
	var mod struct {
		Require []struct{ Path, Version string }
	}
	require.NoError(t, json.Unmarshal(out, &mod))
	versions := map[string]string{}
	for _, r := range mod.Require {
		versions[r.Path] = r.Version
	}
	return versions
}
