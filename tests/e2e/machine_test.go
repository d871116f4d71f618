package e2e

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
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
	t.Run("the machine's own network gets none of its addresses and links", func(t *testing.T) {
		before, err := os.ReadFile(filepath.Join(cluster.Root, ".run", "machine-network")) // up.sh wrote it before it started anything
		require.NoError(t, err, "start the cluster again: an older up.sh started it")
		known := strings.Fields(string(before))
		for _, what := range [][]string{{"address"}, {"route", "show", "table", "all"}, {"-6", "route", "show", "table", "all"}, {"rule"}} {
			out, err := exec.CommandContext(t.Context(), "ip", what...).Output()
			require.NoError(t, err)
			for word := range strings.FieldsSeq(string(out)) {
				require.False(t, !slices.Contains(known, word) && ofCluster(word), "%s is new in ip %s:\n%s", word, strings.Join(what, " "), out)
			}
		}
	})
}

// ofCluster reports whether a word in the output of ip is an address, a network or a link of
// the tests' cluster.
func ofCluster(word string) bool {
	link, _, _ := strings.Cut(strings.TrimSuffix(word, ":"), "@")
	if linkOfCluster.MatchString(link) {
		return true
	}
	address, _, _ := strings.Cut(word, "/")
	ip, err := netip.ParseAddr(address)
	return err == nil && slices.ContainsFunc(networksOfCluster, func(n netip.Prefix) bool { return n.Contains(ip) })
}

var (
	linkOfCluster     = regexp.MustCompile(`^(k8s|cni0|node[1-9])$`)
	networksOfCluster = []netip.Prefix{ // of nodes, pods and services
		netip.MustParsePrefix("10.99.0.0/24"), netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd10::/16"),
	}
)
