package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The tests' cluster does not touch the machine's network, and is not started twice.
func TestClusterOfTests(t *testing.T) {
	own := filepath.Join(cluster.Root, ".run", "kubeconfig")
	if _, err := os.Stat(own); err != nil {
		t.Skip("this is about the cluster of tests/cluster, and there is another")
	}
	t.Run("a second start reports the running cluster", func(t *testing.T) {
		before, err := os.ReadFile(own)
		require.NoError(t, err)
		out, err := exec.CommandContext(t.Context(), filepath.Join(cluster.Root, "tests", "cluster", "up.sh")).CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(out), "the cluster of this checkout is up")
		require.Contains(t, string(out), "down.sh")
		after, err := os.ReadFile(own)
		require.NoError(t, err)
		require.Equal(t, before, after)
		nodes(t) // it still answers
	})
	t.Run("the machine's own network has none of its addresses", func(t *testing.T) {
		links, err := net.Interfaces()
		require.NoError(t, err)
		for _, l := range links {
			require.NotContains(t, append(nodes(t), "k8s", "cni0"), l.Name)
		}
		for _, what := range [][]string{{"address"}, {"route", "show", "table", "all"}, {"-6", "route", "show", "table", "all"}, {"rule"}} {
			out, err := exec.CommandContext(t.Context(), "ip", what...).Output()
			require.NoError(t, err)
			for _, network := range []string{"10.99.0.", "10.244.", "10.96.", "fd10:"} { // nodes, pods, services
				require.NotContains(t, string(out), network)
			}
		}
	})
}
