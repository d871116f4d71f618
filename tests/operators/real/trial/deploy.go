package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

const (
	rootName   = "operator"
	trialMark  = "operators.example.com/trial" // on all namespaces of a trial: the operator's name
	definition = "CustomResourceDefinition"
)

// read decodes the operator's manifests, in the order in which they are applied, and checks that
// they name the operator's workload and images that are built.
func (b *Built) read(text []byte) error {
	objects, err := decode(text)
	if err != nil {
		return err
	}
	first := func(o *unstructured.Unstructured) int {
		return slices.Index([]string{definition, "Namespace"}, o.GetKind())
	}
	slices.SortStableFunc(objects, func(x, y *unstructured.Unstructured) int { return cmp.Compare(first(y), first(x)) })
	b.objects = objects
	for _, o := range workloads(objects) {
		if o.GetKind() == b.Kind && o.GetName() == b.Operator.target() {
			b.target = o
		}
		for _, image := range imagesOf(o) {
			if !slices.ContainsFunc(b.Images, func(i Image) bool { return i.Name+":"+b.Version == image }) {
				return fmt.Errorf("%s %s has image %s, which is not built", o.GetKind(), o.GetName(), image)
			}
		}
	}
	if b.target == nil {
		return fmt.Errorf("they have no %s %s", b.Kind, b.Operator.target())
	}
	return unstructured.SetNestedField(b.target.Object, int64(b.outside()), "spec", "replicas")
}

// workloads returns the Deployments and StatefulSets among objects.
func workloads(objects []*unstructured.Unstructured) (out []*unstructured.Unstructured) {
	for _, o := range objects {
		if o.GetKind() == deployment || o.GetKind() == statefulSet {
			out = append(out, o)
		}
	}
	return out
}

func imagesOf(workload *unstructured.Unstructured) (images []string) {
	for _, field := range []string{"initContainers", "containers"} {
		containers, _, _ := unstructured.NestedSlice(workload.Object, "spec", "template", "spec", field)
		for _, c := range containers {
			if c, ok := c.(map[string]any); ok {
				images = append(images, fmt.Sprint(c["image"]))
			}
		}
	}
	return images
}

// account returns the ServiceAccount of the operator's pods.
func (b *Built) account() string {
	name, _, _ := unstructured.NestedString(b.target.Object, "spec", "template", "spec", "serviceAccountName")
	return cmp.Or(name, "default")
}

// deploy installs the operator without the label of the mesh, after those that it requires.
func (t *trial) deploy(ctx context.Context) error {
	for _, required := range t.required {
		if err := t.install(ctx, required); err != nil {
			return fmt.Errorf("installing %s: %w", required.Name, err)
		}
	}
	return t.install(ctx, t.Built)
}

// install applies the manifests of an operator, and waits until it runs.
func (t *trial) install(ctx context.Context, b *Built) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.Home, Labels: map[string]string{trialMark + "-home": b.Name}}}
	if err := t.Create(ctx, ns); err != nil {
		return fmt.Errorf("creating the operator's namespace: %w", err)
	}
	objects, err := t.objectsOf(b)
	if err != nil {
		return err
	}
	for _, o := range objects {
		if err := t.ApplyObject(ctx, o); err != nil {
			return fmt.Errorf("applying %s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
	for _, o := range workloads(b.objects) {
		err := t.until(ctx, o.GetName()+" to run", func(ctx context.Context) error { return t.RolledOut(ctx, named(o)) })
		if err != nil {
			return err
		}
	}
	return t.until(ctx, "the certificates of webhooks", func(ctx context.Context) error { return t.webhooksReady(ctx, b.objects) })
}

// objectsOf returns the objects of an operator's manifests after those that it works with. What
// the manifests give no namespace belongs into the operator's.
func (t *trial) objectsOf(b *Built) ([]*unstructured.Unstructured, error) {
	support, err := b.support()
	objects := slices.Concat(support, b.objects)
	for _, o := range objects {
		if o.GetNamespace() == "" && t.namespaced(o) {
			o.SetNamespace(b.Home)
		}
	}
	return objects, err
}

// support returns the objects of support.yaml, which the operator works with.
func (b *Built) support() ([]*unstructured.Unstructured, error) {
	text, err := b.manifest("support.yaml")
	if err != nil {
		return nil, err
	}
	objects, err := decode(text)
	return objects, failure.Wrap(err, "reading support.yaml of %s", b.Name)
}

// rbacByHand counts the roles and bindings that the trial has for an operator whose module
// publishes its manifests.
func (b *Built) rbacByHand() (n int, err error) {
	if !b.Source.published() {
		return 0, nil
	}
	support, err := b.support()
	for _, o := range support {
		if o.GroupVersionKind().Group == rbacv1.GroupName {
			n++
		}
	}
	return n, err
}

// namespaced reports whether an object belongs into a namespace. Kinds that the cluster does not
// know yet are of the operator, and their objects name their namespace.
func (t *trial) namespaced(o *unstructured.Unstructured) bool {
	mapping, err := t.RESTMapper().RESTMapping(o.GroupVersionKind().GroupKind(), o.GroupVersionKind().Version)
	return err == nil && mapping.Scope.Name() == meta.RESTScopeNameNamespace
}

// uninstall deletes the objects of an operator's manifests, its definitions last: the
// finalizers of their objects need the operator.
func (t *trial) uninstall(ctx context.Context, b *Built) error {
	objects, err := t.objectsOf(b)
	errs := []error{err}
	for _, o := range slices.Backward(objects) {
		if o.GetKind() != definition && o.GetKind() != "Namespace" {
			errs = append(errs, ignoreGone(t.Delete(ctx, o.DeepCopy())))
		}
	}
	errs = append(errs, removeNamespaces(ctx, t.Cluster, b.Home))
	for _, o := range objects {
		if o.GetKind() == definition {
			errs = append(errs, ignoreGone(t.Delete(ctx, o.DeepCopy())))
		}
	}
	return failure.Wrap(errors.Join(errs...), "uninstalling %s", b.Name)
}

// ignoreGone ignores that an object, or its kind, does not exist.
func ignoreGone(err error) error {
	if meta.IsNoMatchError(err) {
		return nil
	}
	return client.IgnoreNotFound(err)
}

// named returns an empty object that names a workload.
func named(o *unstructured.Unstructured) client.Object {
	meta := metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName()}
	if o.GetKind() == statefulSet {
		return &appsv1.StatefulSet{ObjectMeta: meta}
	}
	return &appsv1.Deployment{ObjectMeta: meta}
}

func (t *trial) named() client.Object { return named(t.target) }

func (t *trial) rolledOut(ctx context.Context) error { return t.RolledOut(ctx, t.named()) }

// label sets the mesh's label on the pod template, or removes it, and waits for the rolling update.
func (t *trial) label(ctx context.Context, on bool) error {
	value := "null"
	if on {
		value = `"true"`
	}
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"labels":{%q:%s}}}}}`, meshv1alpha1.EnableProxyLabel, value)
	if err := t.Patch(ctx, t.named(), client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		return fmt.Errorf("changing the label of the pod template: %w", err)
	}
	return t.until(ctx, "the rolling update", t.rolledOut)
}

func (t *trial) scale(ctx context.Context, replicas int32) error {
	scale := &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.Home, Name: t.target.GetName()}, Spec: autoscalingv1.ScaleSpec{Replicas: replicas},
	}
	return failure.Wrap(t.SubResource("scale").Update(ctx, t.named(), client.WithSubResourceBody(scale)), "scaling the operator")
}

// pods returns the operator's pods that are not terminating.
func (t *trial) pods(ctx context.Context) ([]corev1.Pod, error) {
	labels, _, err := unstructured.NestedStringMap(t.target.Object, "spec", "selector", "matchLabels")
	if err != nil {
		return nil, fmt.Errorf("reading the selector of the operator: %w", err)
	}
	var list corev1.PodList
	err = t.List(ctx, &list, client.InNamespace(t.Home), client.MatchingLabels(labels))
	alive := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	return alive, failure.Wrap(err, "listing the operator's pods")
}

// grantedLocks returns the locks of shards that the mesh permitted the operator to use, because
// its own Role does not.
func (t *trial) grantedLocks(ctx context.Context) (locks []string, err error) {
	var list rbacv1.RoleList
	if err := t.List(ctx, &list, client.MatchingLabels{meshv1alpha1.LockAccessLabel: "true"}); err != nil {
		return nil, fmt.Errorf("listing the Roles for locks: %w", err)
	}
	for _, role := range list.Items {
		if role.Annotations[meshv1alpha1.LockHolderAnnotation] != t.Home+"/"+rootName {
			continue
		}
		for _, rule := range role.Rules {
			locks = append(locks, rule.ResourceNames...)
		}
	}
	slices.Sort(locks)
	return slices.Compact(locks), nil
}

// applyIn applies a manifest of the operator in a namespace.
func (t *trial) applyIn(ctx context.Context, namespace, file string) error {
	text, err := t.manifest(file, "$(NAMESPACE)", namespace)
	if err != nil {
		return err
	}
	objects, err := decode(text)
	if err != nil {
		return fmt.Errorf("reading %s of %s: %w", file, t.Name, err)
	}
	for _, obj := range objects {
		obj.SetNamespace(namespace)
		if err := t.ApplyObject(ctx, obj); err != nil {
			return fmt.Errorf("applying %s of %s: %w", file, t.Name, err)
		}
	}
	return nil
}

// decode reads the documents of a manifest; comments alone are none.
func decode(text []byte) (out []*unstructured.Unstructured, err error) {
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		obj := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(document), &obj.Object); err != nil {
			return nil, err
		}
		if len(obj.Object) > 0 {
			out = append(out, obj)
		}
	}
	return out, nil
}
