package locks

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

func TestOnlyWhatTheHolderWroteIsFreed(t *testing.T) {
	const holder = "p_1"
	for name, c := range map[string]struct {
		record, resource, version string
		freed                     bool
	}{
		"its last write":       {`{"holderIdentity":"p_1"}`, ConfigMaps, "", true},
		"another holder":       {`{"holderIdentity":"p_2"}`, ConfigMaps, "", false},
		"a write since":        {`{"holderIdentity":"p_1"}`, ConfigMaps, "1", false},
		"no record":            {"", ConfigMaps, "", false},
		"an unreadable record": {"{", ConfigMaps, "", false},
		"another object":       {`{"holderIdentity":"p_1"}`, Endpoints, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l---s", Annotations: map[string]string{"keep": "me"}}}
			if c.record != "" {
				object.Annotations[resourcelock.LeaderElectionRecordAnnotationKey] = c.record
			}
			store := fake.NewClientBuilder().WithObjects(object).Build()
			key := client.ObjectKeyFromObject(object)
			require.NoError(t, store.Get(t.Context(), key, object))
			version := object.ResourceVersion
			if c.version != "" {
				version = c.version
			}
			freed, err := Free(t.Context(), store, c.resource, key, holder, version)
			require.NoError(t, err)
			require.Equal(t, c.freed, freed)
			before := object.ResourceVersion
			require.NoError(t, store.Get(t.Context(), key, object))
			require.Equal(t, c.freed, object.ResourceVersion != before)
			require.Equal(t, "me", object.Annotations["keep"])
		})
	}
}
