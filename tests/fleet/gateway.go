package fleet

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

const gateway = "gateway" // the pod and its Service

// createGateway runs the aggregated API that leads to the members, and waits until it serves.
func (s *Site) createGateway(ctx context.Context) error {
	labels := map[string]string{"app": gateway}
	meta := metav1.ObjectMeta{Namespace: s.Home, Name: gateway, Labels: labels}
	certificates, err := s.certificates()
	if err != nil {
		return err
	}
	var args []string
	for _, m := range s.Members {
		address, err := m.address(ctx)
		if err != nil {
			return err
		}
		args = append(args, "-member="+m.Name+"="+address)
	}
	pod := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{
		TerminationGracePeriodSeconds: new(int64(1)),
		Containers: []corev1.Container{{
			Name: gateway, Image: "localhost/ctrlmesh/gateway:dev", ImagePullPolicy: corev1.PullIfNotPresent, Args: args,
			VolumeMounts:   []corev1.VolumeMount{{Name: "certificates", MountPath: "/certificates"}},
			ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8443)}}},
		}},
		Volumes: []corev1.Volume{{Name: "certificates", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: gateway}}}},
	}}
	if err := s.CreateAll(ctx,
		&corev1.Secret{ObjectMeta: meta, Data: certificates},
		&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 443, TargetPort: intstr.FromInt32(8443)}}}},
		pod); err != nil {
		return err
	}
	if err := kube.UntilWithin(ctx, within, "the gateway's pod", func(ctx context.Context) error { return s.Ready(ctx, pod) }); err != nil {
		return err
	}
	if err := client.IgnoreNotFound(s.Delete(ctx, s.apiService())); err != nil { // of a run that was interrupted
		return err
	}
	if err := s.Create(ctx, s.apiService()); err != nil {
		return err
	}
	return kube.UntilWithin(ctx, within, "the gateway", func(ctx context.Context) error {
		_, err := s.Members[0].client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			err = fmt.Errorf("%s: %w", s.Members[0].Name, err)
		}
		return err
	})
}

func (s *Site) apiService() *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
		"metadata": map[string]any{"name": fleetv1.GatewayVersion + "." + fleetv1.GatewayGroup},
		"spec": map[string]any{
			"group": fleetv1.GatewayGroup, "version": fleetv1.GatewayVersion, "groupPriorityMinimum": int64(1000), "versionPriority": int64(1),
			"insecureSkipTLSVerify": true, "service": map[string]any{"namespace": s.Home, "name": gateway},
		},
	}}
}

// certificates returns those with which the gateway asks the members on behalf of its callers.
func (s *Site) certificates() (map[string][]byte, error) {
	out := map[string][]byte{}
	for key, file := range map[string]string{"ca.crt": "ca.crt", "tls.crt": "front-proxy-client.crt", "tls.key": "front-proxy-client.key"} {
		b, err := os.ReadFile(filepath.Join(s.Root, ".run", "pki", file))
		if err != nil {
			return nil, fmt.Errorf("reading the cluster's certificates: %w", err)
		}
		out[key] = b
	}
	return out, nil
}
