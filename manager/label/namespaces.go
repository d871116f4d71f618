package label

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Namespaces labels namespaces with their bucket, for the MutatingAdmissionPolicy: CEL cannot
// compute a hash. The policy stamps nothing in a namespace without the label.
type Namespaces struct {
	Client client.Client
	// Cache reads the metadata of namespaces.
	Cache client.Reader
	// Limiter bounds the writes.
	Limiter *rate.Limiter
	// Skip is the mesh's own namespace, whose objects are not stamped.
	Skip string
}

// Label labels the namespaces whose objects are stamped, and removes the label from others. It
// returns the names of those that it has labelled.
func (n *Namespaces) Label(ctx context.Context, settings *platform.Settings) ([]string, error) {
	all := &metav1.PartialObjectMetadataList{}
	all.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("NamespaceList"))
	if err := n.Cache.List(ctx, all); err != nil {
		return nil, fmt.Errorf("listing namespaces: %w", err)
	}
	var (
		mu       sync.Mutex
		labelled []string
		failed   error
		g        errgroup.Group
	)
	g.SetLimit(workers)
	for _, one := range all.Items {
		want := n.bucket(one.Name, settings)
		if one.Labels[v1alpha1.ShardingHashLabel] == want {
			continue
		}
		g.Go(func() error {
			err := client.IgnoreNotFound(n.write(ctx, one.Name, want))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				failed = fmt.Errorf("labelling namespace %s: %w", one.Name, err)
			case want != "":
				labelled = append(labelled, one.Name)
			}
			return nil
		})
	}
	return labelled, errors.Join(g.Wait(), failed)
}

// bucket returns the label of a namespace; empty if its objects are not stamped.
func (n *Namespaces) bucket(name string, settings *platform.Settings) string {
	if name == n.Skip || !settings.StampsIn(name) {
		return ""
	}
	return sharding.BucketLabel(name)
}

func (n *Namespaces) write(ctx context.Context, name, bucket string) error {
	if err := n.Limiter.Wait(ctx); err != nil {
		return err
	}
	var value *string // null removes the label
	if bucket != "" {
		value = &bucket
	}
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]*string{v1alpha1.ShardingHashLabel: value}}})
	if err != nil {
		return err
	}
	ns := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return n.Client.Patch(ctx, ns, client.RawPatch(types.MergePatchType, data))
}
