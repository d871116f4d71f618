package harness

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	// NetImage has shell tools and a client that is not a Go program.
	NetImage = "localhost/busybox:1"
	// ProbeImage has the program of tests/operators/probe.
	ProbeImage = "localhost/ctrlmesh/probe:dev"
	// ProbeAccount is the service account that CreatePodNamespace creates.
	ProbeAccount = "probe"
	// PolicyLabel is the label by which configurations select their pods.
	PolicyLabel = "policy"
)

// CreateNamespace creates a namespace and returns its name, which contains the given one.
func (w *Testbed) CreateNamespace(ctx context.Context, name string) (string, error) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "chaos-" + name + "-", Labels: Labels}}
	if err := w.Create(ctx, ns); err != nil {
		return "", fmt.Errorf("making a namespace: %w", err)
	}
	return ns.Name, nil
}

// CreatePodNamespace creates a namespace for pods, with a service account that is a cluster
// administrator. Whatever such a pod cannot do, the mesh prevents.
func (w *Testbed) CreatePodNamespace(ctx context.Context, name string) (string, error) {
	home, err := w.CreateNamespace(ctx, name)
	if err != nil {
		return "", err
	}
	owners, err := w.OwnedBy(ctx, home)
	if err != nil {
		return "", err
	}
	return home, w.CreateAll(ctx,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: ProbeAccount}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: home, OwnerReferences: owners},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: home, Name: ProbeAccount}},
		})
}

// NewPod returns a member of the configuration of the given name, captured in a mode.
func NewPod(home, name, config, mode, node string, command ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: home, Name: name,
			Labels:      map[string]string{meshv1alpha1.EnableProxyLabel: "true", PolicyLabel: config},
			Annotations: map[string]string{meshv1alpha1.CaptureAnnotation: mode},
		},
		Spec: corev1.PodSpec{
			ServiceAccountName: ProbeAccount, NodeName: node,
			TerminationGracePeriodSeconds: new(int64),
			Containers: []corev1.Container{{
				Name: "main", Image: ProbeImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: command,
			}},
		},
	}
}

// NewPlainPod returns a pod off the mesh, with an image of the tests.
func NewPlainPod(home, name, image, node string, command ...string) *corev1.Pod {
	p := NewPod(home, name, "", "", node, command...)
	p.Labels, p.Annotations = nil, nil
	p.Spec.Containers[0].Image = image
	return p
}

// CreateReady creates a pod, waits until it is ready, and reads it.
func (w *Testbed) CreateReady(ctx context.Context, p *corev1.Pod) error {
	if err := w.CreateAll(ctx, p); err != nil {
		return err
	}
	return w.UntilObject(ctx, "pod "+p.Name, p, func() error {
		if !kube.PodReady(p) {
			return fmt.Errorf("it is %s and not ready", p.Status.Phase)
		}
		return nil
	})
}

// TokenOf returns a token that is bound to a pod, of its service account.
func (w *Testbed) TokenOf(ctx context.Context, pod *corev1.Pod) (string, error) {
	token, err := w.Clientset.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("making a token of %s: %w", pod.Name, err)
	}
	return token.Status.Token, nil
}
