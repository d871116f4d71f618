package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// owner of the fields that tests apply.
const owner = client.FieldOwner("ctrlmesh-tests")

// applies is how long the cluster may take to be ready for an object, or its kind.
const applies = 5 * time.Minute

// Apply applies, server-side, the objects of YAML or JSON documents in their order.
// A CustomResourceDefinition is waited for, so that objects of its kind may follow.
func (c *Cluster) Apply(ctx context.Context, documents []byte) error {
	objects, err := decode(documents)
	if err != nil {
		return err
	}
	return c.applyAll(ctx, objects)
}

func (c *Cluster) applyAll(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, obj := range objects {
		if err := c.ApplyObject(ctx, obj); err != nil {
			return err
		}
	}
	return nil
}

// ApplyObject applies one object server-side.
func (c *Cluster) ApplyObject(ctx context.Context, obj *unstructured.Unstructured) error {
	name := strings.TrimPrefix(obj.GetNamespace()+"/"+obj.GetName(), "/")
	err := UntilWithin(ctx, applies, obj.GetKind()+" "+name+" to be applied", func(ctx context.Context) error {
		err := c.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(obj.DeepCopy()), owner, client.ForceOwnership)
		if err == nil || mayPass(err) {
			return err
		}
		return Never(err)
	})
	if err != nil || obj.GetKind() != "CustomResourceDefinition" {
		return err
	}
	return UntilWithin(ctx, applies, "CustomResourceDefinition "+name, func(ctx context.Context) error {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := c.Get(ctx, client.ObjectKeyFromObject(obj), crd); err != nil {
			return err
		}
		for _, cond := range crd.Status.Conditions {
			if cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue {
				// Discovery lists it later. The mapper looks for a version that is new in a known group only if
				// that is named.
				served := slices.IndexFunc(crd.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool { return v.Served })
				_, err := c.RESTMapper().RESTMapping(schema.GroupKind{Group: crd.Spec.Group, Kind: crd.Spec.Names.Kind}, crd.Spec.Versions[max(0, served)].Name)
				return err
			}
		}
		return errors.New("not established")
	})
}

// mayPass: errors of a cluster that is still taking in what was applied before.
func mayPass(err error) bool {
	return meta.IsNoMatchError(err) || // the kind was defined a moment ago
		apierrors.IsTooManyRequests(err) ||
		apierrors.IsInternalError(err) && strings.Contains(err.Error(), "failed calling webhook") // who answers it is just starting
}

// ApplyPath applies a file, all .yaml files of a directory, or a directory with a
// kustomization.yaml, except objects of the kinds in without. The path may be relative to
// the repository's root.
func (c *Cluster) ApplyPath(ctx context.Context, path string, without ...string) error {
	if !filepath.IsAbs(path) {
		path = filepath.Join(c.Root, path)
	}
	objects, err := c.read(ctx, path)
	if err != nil {
		return fmt.Errorf("applying %s: %w", path, err)
	}
	objects = slices.DeleteFunc(objects, func(obj *unstructured.Unstructured) bool { return slices.Contains(without, obj.GetKind()) })
	if err := c.applyAll(ctx, objects); err != nil {
		return fmt.Errorf("applying %s: %w", path, err)
	}
	return nil
}

// read returns the objects of a path of ApplyPath.
func (c *Cluster) read(ctx context.Context, path string) ([]*unstructured.Unstructured, error) {
	if _, err := os.Stat(filepath.Join(path, "kustomization.yaml")); err == nil {
		documents, err := c.Kubectl(ctx, "kustomize", path)
		if err != nil {
			return nil, err
		}
		return decode([]byte(documents))
	}
	files := []string{path}
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if info.IsDir() {
		if files, err = filepath.Glob(filepath.Join(path, "*.yaml")); err != nil {
			return nil, err
		}
	}
	var all []*unstructured.Unstructured
	for _, file := range files {
		documents, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		objects, err := decode(documents)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, objects...)
	}
	return all, nil
}

// Kubectl runs the cluster's kubectl and returns what it printed. An error holds
// what it complained of.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	program := filepath.Join(c.Root, ".run", "bin", "kubectl")
	if _, err := os.Stat(program); err != nil {
		program = "kubectl"
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig)
	return output(cmd, "kubectl "+strings.Join(args, " "))
}

// Plugin returns a command line of the kubectl plugin.
func (c *Cluster) Plugin(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.Root, "bin", "kubectl-ctrlmesh"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig)
	return cmd
}

func decode(documents []byte) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	in := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(documents), 4096)
	for {
		var obj unstructured.Unstructured
		if err := in.Decode(&obj.Object); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("decoding document %d: %w", len(out)+1, err)
		}
		if len(obj.Object) == 0 { // only a comment
			continue
		}
		if obj.GetKind() == "" || obj.GetName() == "" {
			return nil, fmt.Errorf("decoding document %d: it has no kind or no name", len(out)+1)
		}
		out = append(out, &obj)
	}
}
