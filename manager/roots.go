package manager

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/roots"
)

// Kinds of which only the metadata is watched.
var (
	namespaceKind = corev1.SchemeGroupVersion.WithKind("Namespace")
	nodeKind      = corev1.SchemeGroupVersion.WithKind("Node")
)

func metadataOf(kind schema.GroupVersionKind) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(kind)
	return o
}

// slimMetadata keeps what tells that an object exists, and whether it is a namespace
// that forbids faults.
func slimMetadata(o any) (any, error) {
	m, ok := o.(*metav1.PartialObjectMetadata)
	if !ok {
		return o, nil
	}
	slim := &metav1.PartialObjectMetadata{TypeMeta: m.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion,
	}}
	if v, ok := m.Labels[v1alpha1.NoFaultsLabel]; ok {
		slim.Labels = map[string]string{v1alpha1.NoFaultsLabel: v}
	}
	return slim, nil
}

// unheard lists the Nodes of which no agent has connected to this manager.
func (w *world) unheard(ctx context.Context) ([]string, error) {
	nodes := &metav1.PartialObjectMetadataList{}
	nodes.SetGroupVersionKind(nodeKind)
	if err := w.cache.List(ctx, nodes); err != nil {
		return nil, fmt.Errorf("listing Nodes: %w", err)
	}
	var names []string
	for _, n := range nodes.Items {
		names = append(names, n.Name)
	}
	return w.push.Unheard(names), nil
}

// keepRoots hands keys over between the shards of roots.
func (w *world) keepRoots(ctx context.Context) error {
	l := w.Listed.Load()
	if l == nil {
		return nil
	}
	// Read after what was listed, so that it is no older. Before the first pods have
	// no policies, so that nothing follows from what agents say of them.
	world := roots.World{Configs: l.Configs, Pods: l.Pods, Namespaces: l.Namespaces, RequestTimeout: w.RequestTimeout(), Node: func(name string) bool {
		return !apierrors.IsNotFound(w.cache.Get(ctx, types.NamespacedName{Name: name}, metadataOf(nodeKind)))
	}}
	if c := w.Compiled.Load(); c != nil {
		world.Compiled, world.Removed = c.Result, w.push.Removed()
	}
	if w.roots.Young() {
		var err error
		if world.Unheard, err = w.unheard(ctx); err != nil {
			return err
		}
	}
	err := w.roots.Round(ctx, world)
	w.nextStep = time.Time{}
	if w.roots.Correcting() {
		w.nextStep = time.Now().Add(roots.CorrectEvery)
	}
	return err
}
