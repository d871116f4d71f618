package trial

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

const (
	account         = "operator"
	certificateName = "serving-certificate"
	rootName        = "operator"
	appLabel        = "app"
	trialMark       = "operators.example.com/trial" // on all namespaces of a trial: the operator's name
)

// deploy runs the operator without the label of the mesh, with all objects that it needs.
func (t *trial) deploy(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: t.home, Labels: map[string]string{trialMark + "-home": t.Name}}}
	if err := t.Create(ctx, ns); err != nil {
		return fmt.Errorf("creating the operator's namespace: %w", err)
	}
	if err := t.applyCRDs(ctx); err != nil {
		return err
	}
	if err := t.applyIn(ctx, t.home, "support.yaml"); err != nil {
		return err
	}
	owned := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: ns.Name, UID: ns.UID}}
	certificate, err := t.certificate()
	if err != nil {
		return err
	}
	objects := []client.Object{
		certificate,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: t.home, Name: account}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: t.home, OwnerReferences: owned},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: t.home, Name: account}},
		},
		&rbacv1.ClusterRole{ // lets the mesh weigh the namespaces
			ObjectMeta: metav1.ObjectMeta{
				Name: t.home, OwnerReferences: owned,
				Labels: map[string]string{meshv1alpha1.GroupName + "/aggregate-to-stamp": "true"},
			},
			Rules: t.weighing(),
		},
		t.workload(t.replicasOutside()),
	}
	if err := t.CreateAll(ctx, objects...); err != nil {
		return fmt.Errorf("deploying the operator: %w", err)
	}
	if err := t.until(ctx, "the operator to run", t.rolledOut); err != nil {
		return err
	}
	return t.applyWebhooks(ctx, certificate.Data[corev1.TLSCertKey], owned)
}

// certificate returns a Secret with a self-signed serving certificate.
func (t *trial) certificate() (*corev1.Secret, error) {
	crt, key, err := cert.GenerateSelfSignedCertKey(t.webhookName(), nil, nil)
	if err != nil {
		return nil, fmt.Errorf("making a serving certificate: %w", err)
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.home, Name: certificateName},
		Data:       map[string][]byte{corev1.TLSCertKey: crt, corev1.TLSPrivateKeyKey: key},
	}, nil
}

func (t *trial) weighing() (rules []rbacv1.PolicyRule) {
	for _, g := range t.Divided {
		rules = append(rules, rbacv1.PolicyRule{APIGroups: g.APIGroups, Resources: g.Resources, Verbs: []string{"list"}})
	}
	return rules
}

// replicasOutside returns how many pods run outside the mesh. Without a lock, a second pod would
// write the same objects as the first.
func (t *trial) replicasOutside() int32 {
	if t.Lockless {
		return 1
	}
	return 2
}

// workload returns the operator's Deployment or StatefulSet.
func (t *trial) workload(replicas int32) client.Object {
	meta := metav1.ObjectMeta{Namespace: t.home, Name: t.Name}
	labels := map[string]string{appLabel: t.Name}
	selector := &metav1.LabelSelector{MatchLabels: labels}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: t.podSpec()}
	if t.Kind == statefulSet {
		return &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, Selector: selector, Template: template, PodManagementPolicy: appsv1.ParallelPodManagement,
		}}
	}
	spec := appsv1.DeploymentSpec{Replicas: &replicas, Selector: selector, Template: template}
	if t.Lockless {
		spec.Strategy.Type = appsv1.RecreateDeploymentStrategyType
	}
	return &appsv1.Deployment{ObjectMeta: meta, Spec: spec}
}

func (t *trial) podSpec() corev1.PodSpec {
	fromField := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	container := corev1.Container{
		Name: "operator", Image: t.image, ImagePullPolicy: corev1.PullNever, Command: t.Command, ReadinessProbe: t.Probe,
		Env: []corev1.EnvVar{
			{Name: "POD_NAMESPACE", ValueFrom: fromField("metadata.namespace")},
			{Name: "RUNTIME_NAMESPACE", ValueFrom: fromField("metadata.namespace")},
			{Name: "POD_NAME", ValueFrom: fromField("metadata.name")},
			{Name: "POD_UID", ValueFrom: fromField("metadata.uid")},
		},
	}
	for _, arg := range t.Args {
		container.Args = append(container.Args, strings.ReplaceAll(arg, "$(HOME)", t.home))
	}
	spec := corev1.PodSpec{ServiceAccountName: account, TerminationGracePeriodSeconds: new(int64(10))}
	volumes := t.Volumes
	if t.Certificate != "" {
		volumes = map[string]corev1.VolumeSource{t.Certificate: {Secret: &corev1.SecretVolumeSource{SecretName: certificateName}}}
		maps.Copy(volumes, t.Volumes)
	}
	for i, path := range slices.Sorted(maps.Keys(volumes)) {
		name := fmt.Sprintf("volume-%d", i)
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: name, VolumeSource: volumes[path]})
		container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: path})
	}
	spec.Containers = []corev1.Container{container}
	return spec
}

// named returns an empty object that names the workload.
func (t *trial) named() client.Object {
	meta := metav1.ObjectMeta{Namespace: t.home, Name: t.Name}
	if t.Kind == statefulSet {
		return &appsv1.StatefulSet{ObjectMeta: meta}
	}
	return &appsv1.Deployment{ObjectMeta: meta}
}

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
		ObjectMeta: metav1.ObjectMeta{Namespace: t.home, Name: t.Name}, Spec: autoscalingv1.ScaleSpec{Replicas: replicas},
	}
	return failure.Wrap(t.SubResource("scale").Update(ctx, t.named(), client.WithSubResourceBody(scale)), "scaling the operator")
}

// pods returns the operator's pods that are not terminating.
func (t *trial) pods(ctx context.Context) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := t.List(ctx, &list, client.InNamespace(t.home), client.MatchingLabels{appLabel: t.Name})
	alive := slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil })
	return alive, failure.Wrap(err, "listing the operator's pods")
}

// applyCRDs applies the definitions of the operator's module unchanged.
func (t *trial) applyCRDs(ctx context.Context) error {
	for _, pattern := range t.CRDs {
		files, err := filepath.Glob(filepath.Join(t.Module, pattern))
		if err != nil || len(files) == 0 {
			return errors.Join(err, fmt.Errorf("the module has no %s", pattern))
		}
		for _, file := range files {
			if err := t.applyCRD(ctx, file); err != nil {
				return err
			}
		}
	}
	return nil
}

// templated matches the lines that the operator's own chart would fill in: labels that name a release.
var templated = regexp.MustCompile(`(?m)^.*\{\{.*\}\}.*\n`)

func (t *trial) applyCRD(ctx context.Context, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading the operator's definitions: %w", err)
	}
	text = templated.ReplaceAll(text, nil)
	return failure.Wrap(t.Apply(ctx, text), "applying %s", filepath.Base(file))
}

// applyIn applies a manifest of the operator in a namespace.
func (t *trial) applyIn(ctx context.Context, namespace, file string) error {
	text, err := t.manifest(file, "$(HOME)", t.home, "$(NAMESPACE)", namespace)
	if err != nil {
		return err
	}
	objects, err := decode(text)
	if err != nil {
		return fmt.Errorf("reading %s of %s: %w", file, t.Name, err)
	}
	for _, obj := range objects {
		if obj.GetKind() != "CustomResourceDefinition" {
			obj.SetNamespace(namespace)
		}
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
