// Package migrate prints the native form of objects of the dialects.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	kridge "github.com/ctrlmesh/ctrlmesh/api/kridge/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect/serve"
)

// Of returns those of some objects that are of dialects, by their kinds.
func Of(documents []*unstructured.Unstructured, namespace string) (out []dialect.Object, err error) {
	scheme := runtime.NewScheme()
	if err := serve.AddToScheme(scheme); err != nil {
		return nil, err
	}
	for _, o := range documents {
		made, err := scheme.New(o.GroupVersionKind())
		typed, ok := made.(dialect.Object)
		if err != nil || !ok {
			continue // it is of no dialect
		}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, typed, true); err != nil {
			return nil, fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
		}
		if typed.GetNamespace() == "" {
			typed.SetNamespace(namespace)
		}
		out = append(out, typed)
	}
	return out, nil
}

// Read reads the objects of dialects in a namespace; in all if it is empty. Kinds that are not served have
// none.
func Read(ctx context.Context, r client.Reader, namespace string) (out []dialect.Object, err error) {
	for _, list := range []client.ObjectList{&kruise.VirtualAppList{}, &kruise.TrafficPolicyList{}, &kridge.ShardingConfigList{}} {
		err := r.List(ctx, list, client.InNamespace(namespace))
		if snapshot.Absent(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("listing objects of dialects: %w: you need permission to list them", err)
		}
		err = meta.EachListItem(list, func(o runtime.Object) error {
			one, ok := o.(dialect.Object)
			if !ok {
				return fmt.Errorf("%T has no metadata", o)
			}
			out = append(out, one)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Write writes native objects as manifests: a document each in YAML, a List in JSON.
func Write(w io.Writer, objects []dialect.Object, asJSON bool) error {
	var items []any
	for _, o := range objects {
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
		if err != nil {
			return fmt.Errorf("converting %s: %w", o.GetName(), err)
		}
		delete(content, "status")
		unstructured.RemoveNestedField(content, "metadata", "creationTimestamp")
		items = append(items, content)
	}
	if asJSON {
		list := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "List", "items": items}}
		return unstructured.UnstructuredJSONScheme.Encode(list, w)
	}
	var errs []error
	for _, i := range items {
		text, err := yaml.Marshal(i)
		if err == nil {
			_, err = fmt.Fprintf(w, "---\n%s", text)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
