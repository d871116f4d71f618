package roots

import (
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// Kinds that the manager may not list are told of, with the command that lets it.
func TestWhatMayNotBeWeighed(t *testing.T) {
	client := fake.NewSimpleMetadataClient(fake.NewTestScheme())
	client.PrependReactor("list", "foos", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: "example.com", Resource: "foos"}, "", nil)
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	weighed := make(chan struct{}, 8)
	w := &Weigher{
		Metadata: client, Limiter: rate.NewLimiter(rate.Inf, 0), Log: slog.New(slog.DiscardHandler),
		Served: func() ([]*metav1.APIResourceList, error) {
			return []*metav1.APIResourceList{{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{
				{Name: "foos", Kind: "Foo", Namespaced: true, Verbs: []string{"list", "patch"}},
			}}}, nil
		},
		Changed: func() { weighed <- struct{}{} },
	}
	root := &v1alpha1.ShardingConfig{ObjectMeta: metav1.ObjectMeta{UID: "root"}}
	root.Spec.Root = &v1alpha1.RootConfig{ResourceSelector: []v1alpha1.ObjectLimiter{{
		RelateResources: []v1alpha1.ResourceGroup{{APIGroups: []string{"example.com"}, Resources: []string{"foos"}}},
	}}}
	w.Set([]*v1alpha1.ShardingConfig{root}, []string{"a", "b"})
	require.Empty(t, w.Problem("root"))
	go func() { _ = w.Run(ctx) }()
	<-weighed
	require.Contains(t, w.Problem("root"), "kubectl create clusterrole ctrlmesh-stamp-foos.example.com --verb=list --resource=foos.example.com")
	require.Empty(t, w.Problem("another"))
}

// One request that failed says nothing of what else there is.
func TestWhatCannotBeCountedNowWeighsWhatItDid(t *testing.T) {
	client := fake.NewSimpleMetadataClient(fake.NewTestScheme())
	client.PrependReactor("list", "foos", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if ns := a.GetNamespace(); ns == "was" || ns == "new" {
			return true, nil, apierrors.NewTimeoutError("the apiserver is being restarted", 1)
		}
		more := int64(9)
		return true, &metav1.List{
			ListMeta: metav1.ListMeta{RemainingItemCount: &more},
			Items:    []runtime.RawExtension{{Object: &metav1.PartialObjectMetadata{}}},
		}, nil
	})
	w := &Weigher{
		Metadata: client, Limiter: rate.NewLimiter(rate.Inf, 0), Log: slog.New(slog.DiscardHandler),
		Served: func() ([]*metav1.APIResourceList, error) {
			return []*metav1.APIResourceList{{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{
				{Name: "foos", Kind: "Foo", Namespaced: true, Verbs: []string{"list", "patch"}},
			}}}, nil
		},
	}
	one := &weighing{
		groups:  []v1alpha1.ResourceGroup{{APIGroups: []string{"example.com"}, Resources: []string{"foos"}}},
		counted: map[string]int64{"was": 7, "z": 3, "deleted": 5},
	}
	counted, err := w.count(t.Context(), one, []string{"was", "new", "z"})
	require.ErrorContains(t, err, "the apiserver is being restarted")
	require.Equal(t, map[string]int64{"was": 7, "z": 10}, counted)
}
