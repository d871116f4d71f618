package command

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

func counting(_ *testing.T, c *meshtest.Cluster) { c.Counts() }

// refusing lets the user read no metrics.
func refusing(_ *testing.T, c *meshtest.Cluster) {
	c.Metrics = func(context.Context, *corev1.Pod) (io.ReadCloser, error) {
		return nil, errors.New("pods/portforward is forbidden")
	}
}

func TestCost(t *testing.T) {
	requireScenarios(t, []scenario{
		{name: "cost", plant: counting, args: "cost --for 1ms"},
		{name: "cost-all", plant: counting, args: "cost -A --for 1ms", tables: true},
		{name: "cost-forbidden", plant: refusing, args: "cost --for 1ms", code: Unknown, tables: true},
		{name: "cost-no-time", plant: counting, args: "cost --for 0s", code: Unknown, tables: true},
		{name: "cost-no-pods", plant: counting, args: "cost -n quiet --for 1h", tables: true},
		{name: "cost-unreachable", plant: unreachable, args: "cost --for 1ms", code: Unknown, tables: true},
	})
}

func TestCostReadsBoundedMetrics(t *testing.T) {
	c := meshtest.Healthy(t)
	c.Metrics = func(context.Context, *corev1.Pod) (io.ReadCloser, error) {
		return io.NopCloser(io.MultiReader(strings.NewReader("# "), endless{})), nil
	}
	r := run(t, c, "", "cost", "--for=1ms")
	require.Equal(t, Unknown, r.code)
	require.Contains(t, r.err, "longer than 32 MiB")
}

// endless is a comment that does not end.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '-'
	}
	return len(p), nil
}
