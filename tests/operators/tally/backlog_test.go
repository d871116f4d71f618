package main

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/tally/v1"
)

func TestBacklogCountsUnreconciledObjects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheme := runtime.NewScheme()
		require.NoError(t, v1.AddToScheme(scheme))
		var objects []client.Object
		for _, name := range []string{"done", "failing", "starved"} {
			o := &v1.Tally{}
			o.Namespace, o.Name, o.Generation = "ns", name, 1
			if name == "done" {
				o.Record("pod")
			}
			objects = append(objects, o)
		}
		b := newBacklog(fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build(), "pod")
		for range 4 {
			waiting, err := b.waiting(t.Context(), time.Now())
			require.NoError(t, err)
			require.Empty(t, waiting)
			time.Sleep(3 * time.Second)
			b.began(client.ObjectKeyFromObject(objects[1]))
		}
		waiting, err := b.waiting(t.Context(), time.Now())
		require.NoError(t, err)
		require.Equal(t, map[string]float64{"ns/starved": 12}, waiting)

		b.began(client.ObjectKeyFromObject(objects[2])) // at last
		time.Sleep(time.Second)
		waiting, err = b.waiting(t.Context(), time.Now())
		require.NoError(t, err)
		require.Empty(t, waiting)
	})
}
