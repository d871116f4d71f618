package roots

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

func TestPodsArePlacedFromTheFirstOrdinal(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(2, 1)
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "op"},
		Spec:       appsv1.StatefulSetSpec{Ordinals: &appsv1.StatefulSetOrdinals{Start: 5}},
	}
	require.NoError(t, m.Create(t.Context(), set))
	five, six := m.pod(5), m.pod(6)
	m.goOn(time.Minute, nil)
	require.Equal(t, "op-1-normal", m.shardOf(five))
	require.Equal(t, "op-2-normal", m.shardOf(six))
	require.Equal(t, string(v1alpha1.ReasonSettled), m.ready().Reason, "%s", m.ready().Message)
}

// Pods are not placed by a guess.
func TestNoPodIsPlacedBeforeTheFirstOrdinalIsKnown(t *testing.T) {
	t.Parallel()
	m := newMesh(t)
	m.root(1, 1)
	p := m.pod(0)
	m.reads = errors.New("unavailable")
	require.NoError(t, m.round()) // which reads the root
	require.ErrorContains(t, m.round(), "reading StatefulSet op")
	m.reads = nil
	m.goOn(time.Minute, nil)
	require.Equal(t, "op-1-normal", m.shardOf(p))
	m.reads = errors.New("unavailable")
	m.goOn(time.Minute, nil) // what was read stays
}
