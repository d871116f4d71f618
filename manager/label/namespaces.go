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

	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
	"github.com/ctrlmesh/ctrlmesh/manager/platform"
)

// Namespaces labels namespaces. MutatingAdmissionPolicies read the labels.
type Namespaces struct {
	Client client.Client
	// Cache reads the metadata of namespaces.
	Cache client.Reader
	// Limiter bounds the writes.
	Limiter *rate.Limiter
}

// Bucket returns the values of ShardingHashLabel: CEL cannot compute a hash. Namespaces without
// the label, such as that of the mesh, have no objects that are stamped.
func Bucket(mesh string, settings *platform.Settings) func(namespace string) string {
	return func(namespace string) string {
		if namespace == mesh || !settings.StampsIn(namespace) {
			return ""
		}
		return sharding.BucketLabel(namespace)
	}
}

// Set gives each namespace the value that want returns for a label, and removes the label where
// that is empty. It returns the names of the namespaces that it has labelled.
func (n *Namespaces) Set(ctx context.Context, label string, want func(namespace string) string) ([]string, error) {
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
		value := want(one.Name)
		if one.Labels[label] == value {
			continue
		}
		g.Go(func() error {
			err := client.IgnoreNotFound(n.write(ctx, one.Name, label, value))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				failed = fmt.Errorf("labelling namespace %s: %w", one.Name, err)
			case value != "":
				labelled = append(labelled, one.Name)
			}
			return nil
		})
	}
	return labelled, errors.Join(g.Wait(), failed)
}

func (n *Namespaces) write(ctx context.Context, name, label, value string) error {
	if err := n.Limiter.Wait(ctx); err != nil {
		return err
	}
	labels := map[string]*string{label: nil} // null removes the label
	if value != "" {
		labels[label] = &value
	}
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err != nil {
		return err
	}
	ns := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	return n.Client.Patch(ctx, ns, client.RawPatch(types.MergePatchType, data))
}
