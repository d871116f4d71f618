package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// plugin runs the kubectl plugin, and returns what it printed and its exit code.
func plugin(ctx context.Context, t *testing.T, args ...string) (out string, code int) {
	t.Helper()
	cmd := exec.CommandContext(ctx, filepath.Join(cluster.Root, "bin", "kubectl-ctrlmesh"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+cluster.Kubeconfig)
	printed, err := cmd.CombinedOutput()
	if exited, ok := errors.AsType[*exec.ExitError](err); ok && ctx.Err() == nil {
		return string(printed), exited.ExitCode()
	}
	require.NoError(t, err, "%s", printed)
	return string(printed), 0
}

// says requires that the plugin prints some texts and exits with a code.
func says(t *testing.T, code int, args []string, texts ...string) {
	t.Helper()
	out, exited := plugin(t.Context(), t, args...)
	require.Equal(t, code, exited, "%s", out)
	for _, text := range texts {
		require.Contains(t, out, text)
	}
}

// ownerByPlugin returns the shard of a root that owns a namespace, as the plugin prints it.
func ownerByPlugin(t *testing.T, home, root, namespace string) string {
	t.Helper()
	out, code := plugin(t.Context(), t, "owner", root, namespace, "-n", home, "-o", "json")
	require.Zero(t, code, "%s", out)
	var owner struct{ Shard string }
	require.NoError(t, json.Unmarshal([]byte(out), &owner), "%s", out)
	return owner.Shard
}

// The plugin finds nothing wrong with a healthy mesh, and shows what is there.
func TestCommandLine(t *testing.T) {
	p := newPair(t)
	until(t, "a mesh without findings", func(ctx context.Context) error { // an earlier test may have restarted parts of it
		if out, code := plugin(ctx, t, "check"); code != 0 {
			return fmt.Errorf("exit code %d: %s", code, out)
		}
		return nil
	})
	says(t, 0, []string{"check", "--pre"}, "no problems found")
	says(t, 0, []string{"status", "--wait"}, p.namespace, "manager: 2/2 ready")
	says(t, 0, []string{"version"}, "manager", "agent")
	says(t, 0, []string{"shards", "a", "-n", p.namespace}, "1/1", "ebpf")
	says(t, 2, []string{"shards", "none", "-n", p.namespace}, "none")
	says(t, 0, []string{"lint", "-f", filepath.Join(cluster.Root, "deploy", "examples", "sharding-root.yaml")})
	misspelled := filepath.Join(t.TempDir(), "misspelled.yaml")
	require.NoError(t, os.WriteFile(misspelled, []byte("apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: a}\nspec: {limit: []}\n"), 0o600))
	says(t, 1, []string{"lint", "-f", misspelled}, "spec.limit: unknown field")
}
