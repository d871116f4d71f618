package capture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// newIntruder returns a pod that makes attacks on command. Its CPU limit keeps its own
// work from slowing others down.
func newIntruder(namespace, config, mode, node string) *corev1.Pod {
	p := harness.NewPod(namespace, intruderName, config, mode, node, "sleep", "1000000")
	c := &p.Spec.Containers[0]
	c.Image = intruderImage
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("250m")}
	return p
}

// startIntruder starts a member of the victim's shard that is root, has network capabilities,
// and has a token of the victim.
func (s *suite) startIntruder(ctx context.Context, victim *fleet.Member) error {
	token, err := s.TokenOf(ctx, victim.Pod)
	if err != nil {
		return err
	}
	// The intruder has an account of its own, without permissions: the apiserver's fairness is
	// between accounts, and the apiserver is not the target.
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: victim.Namespace, Name: intruderName}}
	p := newIntruder(victim.Namespace, victim.Policy, victim.Mode, victim.Spec.NodeName)
	p.Spec.ServiceAccountName = account.Name
	c := &p.Spec.Containers[0]
	c.SecurityContext = &corev1.SecurityContext{
		RunAsUser:    new(int64),
		Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NET_RAW", "NET_ADMIN"}},
	}
	c.VolumeMounts = []corev1.VolumeMount{{Name: "token", MountPath: "/token"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "borrowed"}}}}
	err = s.CreateAll(ctx, account, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: victim.Namespace, Name: "borrowed"},
		StringData: map[string]string{"token": token},
	})
	if err != nil {
		return err
	}
	return s.CreateReady(ctx, p)
}

// startOutsider starts an intruder off the mesh, without permissions, in a namespace of its
// own. It returns the namespace.
func (s *suite) startOutsider(ctx context.Context, node string) (string, error) {
	home, err := s.CreateNamespace(ctx, "outsider")
	if err != nil {
		return "", err
	}
	p := newIntruder(home, "", "", node)
	p.Labels, p.Annotations = nil, nil
	p.Spec.ServiceAccountName, p.Spec.AutomountServiceAccountToken = "", new(bool)
	return home, s.CreateReady(ctx, p)
}

// intrude makes one attack and returns why it failed. It returns an error if the attack
// succeeded or could not be made.
func (s *suite) intrude(ctx context.Context, namespace string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, harness.Timeout)
	defer cancel()
	stdout, _, err := s.Exec(ctx, namespace, intruderName, "", append([]string{"intruder"}, args...)...)
	if err != nil {
		return "", err
	}
	var v struct {
		Held bool
		Why  string
	}
	if err := json.Unmarshal([]byte(stdout), &v); err != nil {
		return "", fmt.Errorf("reading what came of it: %w", err)
	}
	if !v.Held {
		return "", errors.New(v.Why)
	}
	const maxLength = 150
	return v.Why[:min(maxLength, len(v.Why))], nil
}
