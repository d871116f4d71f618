package inject

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/trust"
)

const (
	// MeshBundle is the ConfigMap with the mesh CA alone.
	MeshBundle = "ctrlmesh-ca.crt"
	// BothBundle is the ConfigMap with the mesh CA and the cluster's.
	BothBundle = compile.BothBundle
	// EgressBundle is the ConfigMap with the egress CA, and no other.
	EgressBundle = "ctrlmesh-egress-ca.crt"
	// clusterBundle is the ConfigMap that Kubernetes writes into every namespace.
	clusterBundle = compile.ClusterBundle
	// BundleLabel marks the mesh's bundles, so that only they are watched.
	BundleLabel = v1alpha1.GroupName + "/bundle"

	bundleKey = "ca.crt"
	// apiserverSigner is the signer of the ClusterTrustBundles that verify the apiserver.
	apiserverSigner = "kubernetes.io/kube-apiserver-serving"
)

// Bundles writes the mesh's bundles.
type Bundles struct {
	// Client is uncached.
	Client client.Client
	// Mesh, Cluster and Egress return the CAs in PEM.
	Mesh, Cluster, Egress func() []byte
	// Reload reads the mesh's CAs again. It may be nil.
	Reload func(context.Context) error
}

// BundleOf returns the bundle for a value of the trust annotation; empty for other values.
func BundleOf(trust string) string {
	switch trust {
	case v1alpha1.TrustMesh:
		return MeshBundle
	case v1alpha1.TrustBoth:
		return BothBundle
	}
	return ""
}

// content returns the content of a bundle.
func (b *Bundles) content(name string) (map[string]string, error) {
	if name == EgressBundle {
		return b.egress()
	}
	mesh, cluster := b.Mesh(), b.Cluster()
	switch {
	case len(mesh) == 0:
		return nil, errors.New("the mesh CA is not loaded yet")
	case name == MeshBundle:
		return map[string]string{bundleKey: string(mesh)}, nil
	case len(cluster) == 0:
		return nil, errors.New("the cluster's CA is unknown")
	}
	return map[string]string{bundleKey: string(mesh) + string(cluster)}, nil
}

// egress returns all certificates in one file, for Node.js, and each in its own file, for others.
func (b *Bundles) egress() (map[string]string, error) {
	bundle := b.Egress()
	if len(bundle) == 0 {
		return nil, errors.New("the egress CA is not loaded yet")
	}
	files, err := trust.Directory(bundle)
	if err != nil {
		return nil, fmt.Errorf("splitting the egress CA: %w", err)
	}
	files[bundleKey] = string(bundle)
	return files, nil
}

// Right reports whether a ConfigMap has the right content.
func (b *Bundles) Right(cm *corev1.ConfigMap) bool {
	want, err := b.content(cm.Name)
	return err == nil && cm.Labels[BundleLabel] == "true" && maps.Equal(cm.Data, want) && len(cm.BinaryData) == 0
}

// Ensure writes the bundle of a namespace if it is not right.
func (b *Bundles) Ensure(ctx context.Context, namespace, name string) error {
	key := types.NamespacedName{Namespace: namespace, Name: name}
	var err error
	for attempt := range 4 { // others may write it at the same time
		var want map[string]string
		if want, err = b.content(name); err != nil {
			return err
		}
		cm := &corev1.ConfigMap{}
		err = b.Client.Get(ctx, key, cm)
		switch {
		case apierrors.IsNotFound(err):
			err = b.Client.Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{BundleLabel: "true"}},
				Data:       want,
			})
		case err != nil:
		case b.Right(cm):
			return nil
		case attempt == 0 && b.Reload != nil:
			// The bundle may be newer than the CAs in memory, after a rotation.
			if err = b.Reload(ctx); err == nil {
				continue
			}
		case cm.Immutable != nil && *cm.Immutable:
			err = b.Client.Delete(ctx, cm, client.Preconditions{UID: &cm.UID})
			if err == nil {
				continue
			}
		default:
			metav1.SetMetaDataLabel(&cm.ObjectMeta, BundleLabel, "true")
			cm.Data, cm.BinaryData = want, nil
			err = b.Client.Update(ctx, cm)
		}
		if err == nil {
			return nil
		}
		if !isRace(err) {
			break
		}
	}
	return fmt.Errorf("writing ConfigMap %s: %w", key, err)
}

// isRace reports whether the object was written by another client meanwhile.
func isRace(err error) bool {
	return (apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) || apierrors.IsNotFound(err)) &&
		!apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}
