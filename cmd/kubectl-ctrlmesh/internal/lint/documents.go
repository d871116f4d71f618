package lint

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Document is a document of a file.
type Document struct {
	File string
	// Number counts from 1, with documents that contain nothing.
	Number int
	// Objects are the object in it, or those of a List.
	Objects []*unstructured.Unstructured
	// Err is why it cannot be parsed.
	Err error
}

// Parse reads the documents of a file. A document that is no YAML has an error.
func Parse(file string, r io.Reader) ([]Document, error) {
	var out []Document
	reader := utilyaml.NewYAMLReader(bufio.NewReader(r))
	for n := 1; ; n++ {
		text, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, fmt.Errorf("reading %s: %w", file, err)
		}
		d := Document{File: file, Number: n}
		var content map[string]any
		converted, err := yaml.YAMLToJSONStrict(bytes.TrimSpace(text))
		if err == nil {
			err = json.Unmarshal(converted, &content) // it keeps integers
		}
		if d.Err = err; err == nil && len(content) > 0 {
			d.Objects, d.Err = objectsOf(content)
		}
		out = append(out, d)
	}
}

// objectsOf returns an object, or the items of a List.
func objectsOf(content map[string]any) ([]*unstructured.Unstructured, error) {
	o := &unstructured.Unstructured{Object: content}
	if !o.IsList() {
		return []*unstructured.Unstructured{o}, nil
	}
	list, err := o.ToList()
	if err != nil {
		return nil, err
	}
	return collect.Pointers(list.Items), nil
}

// objects are those of files, in place of an apiserver.
type objects struct {
	configs []v1alpha1.ShardingConfig
	apps    []kruise.VirtualApp
}

// Get implements client.Reader. It finds nothing.
func (objects) Get(_ context.Context, key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
}

// List implements client.Reader, for the lists that admission reads. There are no pods.
func (o objects) List(_ context.Context, list client.ObjectList, opts ...client.ListOption) error {
	var options client.ListOptions
	options.ApplyOptions(opts)
	in := func(namespace string) bool { return options.Namespace == "" || options.Namespace == namespace }
	switch list := list.(type) {
	case *v1alpha1.ShardingConfigList:
		for _, c := range o.configs {
			if in(c.Namespace) {
				list.Items = append(list.Items, *c.DeepCopy())
			}
		}
	case *kruise.VirtualAppList:
		for _, a := range o.apps {
			if in(a.Namespace) {
				list.Items = append(list.Items, *a.DeepCopy())
			}
		}
	case *corev1.PodList:
	default:
		return fmt.Errorf("listing %T: not among what admission reads", list)
	}
	return nil
}
