package validate

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// excluding is a shard of all but n namespaces, which are called as examples are.
func excluding(name, format string, n int) *v1alpha1.ShardingConfig {
	c := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	c.Spec.Controller = &v1alpha1.ControllerConfig{LeaderElectionName: "lock"}
	values := make([]string, n)
	for i := range values {
		values[i] = fmt.Sprintf(format, i)
	}
	c.Spec.Limits = []v1alpha1.ObjectLimiter{{
		RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{"", "apps", "batch"}, Resources: []string{"a", "b", "c", "d"}}},
		Selector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: v1alpha1.NamespaceLabel, Operator: metav1.LabelSelectorOpNotIn, Values: values},
		}},
	}}
	return c
}

// Two such shards once cost n*n: 4.3 s for 4,000 names, half a minute for 10,000.
func TestComparisonOfLongSelectorsIsLinear(t *testing.T) {
	const names = 10_000
	ctx, began := t.Context(), processorTime(t)
	msg, err := divided(ctx, excluding("a", "example-%d", names), []v1alpha1.ShardingConfig{*excluding("b", "tenant-%d", names)})
	require.NoError(t, err)
	require.Contains(t, msg, "would be owned by this and by ShardingConfig b")
	require.Less(t, processorTime(t)-began, 10*time.Second)

	t.Run("also if no bucket is left", func(t *testing.T) {
		a, b := excluding("a", "example-%d", names), excluding("b", "tenant-%d", names)
		bucket := func(op metav1.LabelSelectorOperator) metav1.LabelSelectorRequirement {
			return metav1.LabelSelectorRequirement{Key: v1alpha1.ShardingHashLabel, Operator: op, Values: []string{"3"}}
		}
		for c, op := range map[*v1alpha1.ShardingConfig]metav1.LabelSelectorOperator{a: metav1.LabelSelectorOpIn, b: metav1.LabelSelectorOpNotIn} {
			s := c.Spec.Limits[0].Selector
			s.MatchExpressions = append(s.MatchExpressions, bucket(op))
		}
		msg, err := divided(ctx, a, []v1alpha1.ShardingConfig{*b})
		require.NoError(t, err)
		require.Empty(t, msg)
		require.Less(t, processorTime(t)-began, 20*time.Second)
	})
}

// processorTime returns what the tests have used of it, which does not depend on how busy the
// machine is.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

func TestComparisonEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := divided(ctx, excluding("a", "a-%d", 10), []v1alpha1.ShardingConfig{*excluding("b", "b-%d", 10)})
	require.ErrorIs(t, err, context.Canceled)
	_, err = overlapping(ctx, config(t, "a", good), []v1alpha1.ShardingConfig{*config(t, "b", good)}, nil)
	require.ErrorIs(t, err, context.Canceled)
}

func TestLongSpecIsRefused(t *testing.T) {
	c := excluding("a", "a-name-of-some-length-that-many-namespaces-have-"+strings.Repeat("x", 10)+"-%d", 15_000)
	require.ErrorContains(t, Config(c).ToAggregate(), "spec: Too long")
}

func BenchmarkDivided(b *testing.B) {
	for _, names := range []int{1_000, 10_000} {
		mine, others := excluding("a", "example-%d", names), []v1alpha1.ShardingConfig{*excluding("b", "tenant-%d", names)}
		b.Run(fmt.Sprint(names), func(b *testing.B) {
			for b.Loop() {
				if msg, err := divided(b.Context(), mine, others); msg == "" || err != nil {
					b.Fatal(msg, err)
				}
			}
		})
	}
}
