package snapshot

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

// Configs reads the configurations of a namespace; of all if it is empty.
func Configs(namespace string) Part {
	return Part{"ShardingConfigs", func(ctx context.Context, r Reader, s *Snapshot) error {
		in := client.InNamespace(namespace)
		err := list(ctx, r, func(page v1alpha1.ShardingConfigList) { s.Configs = append(s.Configs, page.Items...) }, in)
		if err != nil && !Absent(err) {
			return err
		}
		err = list(ctx, r, func(page kridge.ShardingConfigList) {
			for i := range page.Items {
				if page.Items[i].Labels[kridge.RootLabel] == "" { // otherwise Kridge's own manager derived it
					s.translate(&page.Items[i])
				}
			}
		}, in)
		if err != nil && !unserved(err) {
			return err
		}
		err = list(ctx, r, func(page kruise.VirtualAppList) {
			for i := range page.Items {
				s.translate(&page.Items[i])
			}
		}, in)
		if err != nil && !unserved(err) {
			return err
		}
		return nil
	}}
}

// unserved reports whether an error means that the kinds of a dialect are not served to the user.
func unserved(err error) bool { return Absent(err) || apierrors.IsForbidden(err) }

func (s *Snapshot) translate(o client.Object) {
	if c, ok := serve.Config(o); ok {
		s.Configs = append(s.Configs, *c)
	}
}

// Members reads the labelled pods of a namespace; of all if it is empty.
func Members(namespace string) Part {
	return Part{"labelled pods", func(ctx context.Context, r Reader, s *Snapshot) error {
		return list(ctx, r, func(page corev1.PodList) {
			for _, pod := range page.Items {
				if !ended(&pod) {
					s.Pods = append(s.Pods, pod)
				}
			}
		}, client.InNamespace(namespace), client.MatchingLabels{v1alpha1.EnableProxyLabel: "true"})
	}}
}

// Single reads a pod, with or without the label.
func Single(namespace, name string) Part {
	return Part{"pod " + name, func(ctx context.Context, r Reader, s *Snapshot) (err error) {
		s.Subjects.Pod, err = get[corev1.Pod](ctx, r, namespace, name)
		return err
	}}
}

// Locks reads the Leases in the namespaces of the locks of configurations that were read.
var Locks = Part{"Leases of operators", func(ctx context.Context, r Reader, s *Snapshot) error {
	for _, namespace := range s.lockNamespaces() {
		err := list(ctx, r, func(page coordinationv1.LeaseList) {
			for _, l := range page.Items {
				s.Leases[types.NamespacedName{Namespace: l.Namespace, Name: l.Name}] = l
			}
		}, client.InNamespace(namespace))
		if err != nil {
			return fmt.Errorf("in namespace %s: %w", namespace, err)
		}
		s.LeasesRead[namespace] = true
	}
	return nil
}}

// Others reads the names of pods without the label in the namespaces of locks.
var Others = Part{"names of pods of operators", func(ctx context.Context, r Reader, s *Snapshot) error {
	for _, namespace := range s.lockNamespaces() {
		err := list(ctx, r, func(page corev1.PodList) {
			for _, pod := range page.Items {
				if pod.Labels[v1alpha1.EnableProxyLabel] != "true" {
					s.Outside[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = true
				}
			}
		}, client.InNamespace(namespace))
		if err != nil {
			return fmt.Errorf("in namespace %s: %w", namespace, err)
		}
	}
	return nil
}}

// lockNamespaces returns the namespaces of the locks of all configurations, sorted.
func (s *Snapshot) lockNamespaces() []string {
	seen := map[string]bool{}
	for i := range s.Configs {
		c := &s.Configs[i]
		for _, l := range c.Status.Locks {
			seen[l.Namespace] = true
		}
		for _, l := range compile.NamedLocks(c) {
			seen[l.Namespace] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// Namespaces reads the labels of all namespaces.
var Namespaces = Part{"namespaces", func(ctx context.Context, r Reader, s *Snapshot) error {
	s.Labels = map[string]labels.Set{}
	return list(ctx, r, func(page corev1.NamespaceList) {
		for _, n := range page.Items {
			s.Labels[n.Name] = n.Labels
		}
	})
}}

// Existence reads whether a namespace exists. Without the permission to read it, that stays unknown.
func Existence(namespace string) Part {
	return Part{"namespace " + namespace, func(ctx context.Context, r Reader, s *Snapshot) error {
		found, err := get[corev1.Namespace](ctx, r, "", namespace)
		if err == nil {
			s.Exists[namespace] = found != nil
		}
		if apierrors.IsForbidden(err) {
			return nil
		}
		return err
	}}
}
