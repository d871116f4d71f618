package roots

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

// Both shards of a root write Secrets of one namespace, which it does not divide.
func TestSharedWritesAreReported(t *testing.T) {
	t.Parallel()
	m, pods := sharded(t, 2)
	m.goOn(time.Minute, nil)
	is := func() metav1.Condition {
		return *apimeta.FindStatusCondition(m.get().Status.Conditions, v1alpha1.ConditionUndivided)
	}
	require.Equal(t, metav1.ConditionFalse, is().Status)

	m.activity = map[string][]*meshv1.ResourceActivity{}
	for _, p := range pods {
		m.activity[string(p.UID)] = []*meshv1.ResourceActivity{{Resource: "secrets", Writes: 5, Keys: []uint64{sample.Key("green", "")}}}
	}
	m.goOn(2*time.Second, nil)
	want := []v1alpha1.UndividedResource{{Resource: "secrets", Shards: []string{"op-1-normal", "op-2-normal"}, Writes: 10, Common: 1, Namespaces: []string{"green"}}}
	require.Equal(t, want, m.get().Status.Root.Undivided)
	require.Equal(t, metav1.ConditionTrue, is().Status)
	require.Equal(t, metav1.ConditionTrue, m.ready().Status, "a warning")

	// A new leader knows nothing before the agents connect.
	for _, p := range pods {
		m.away[p.Spec.NodeName] = true
	}
	m.lead()
	m.goOn(2*time.Second, nil)
	require.Equal(t, want, m.get().Status.Root.Undivided)
	require.Equal(t, metav1.ConditionTrue, is().Status)

	clear(m.away)
	m.activity[string(pods[1].UID)] = nil
	m.goOn(2*time.Second, nil)
	require.Empty(t, m.get().Status.Root.Undivided)
	require.Equal(t, metav1.ConditionFalse, is().Status)
}
