package capture

import (
	"context"
	"fmt"
	"net"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
)

// decoy is a server that records connections and sends nothing.
type decoy struct {
	*corev1.Pod
	address string
}

// startDecoy starts a decoy and proves that it records connections.
func (s *suite) startDecoy(ctx context.Context, namespace string) (decoy, error) {
	p := harness.NewPlainPod(namespace, "decoy", harness.NetImage, s.Nodes[1], "sh", "-c", "touch /tmp/visitors; exec nc -ll -p 8443 -e sh -c 'echo >>/tmp/visitors'")
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
		Exec: &corev1.ExecAction{Command: []string{"sh", "-c", "netstat -ltn | grep -q :8443"}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	if err := s.CreateReady(ctx, p); err != nil {
		return decoy{}, err
	}
	d := decoy{p, net.JoinHostPort(p.Status.PodIP, "8443")}
	// A connection must be recorded.
	if _, _, err := s.Exec(ctx, namespace, p.Name, "", "sh", "-c", "nc "+p.Status.PodIP+" 8443 </dev/null"); err != nil {
		return decoy{}, err
	}
	return d, s.Until(ctx, "the decoy's first visitor", func(ctx context.Context) error {
		n, err := s.allConnections(ctx, d)
		if err == nil && n != 1 {
			err = fmt.Errorf("it had %d", n)
		}
		return err
	})
}

// connections returns how many connections the decoy has had since it was started.
func (s *suite) connections(ctx context.Context, d decoy) (int, error) {
	n, err := s.allConnections(ctx, d)
	return n - 1, err
}

// allConnections includes the one that proves that they are recorded.
func (s *suite) allConnections(ctx context.Context, d decoy) (int, error) {
	out, _, err := s.Exec(ctx, d.Namespace, d.Name, "", "cat", "/tmp/visitors")
	return strings.Count(out, "\n"), err
}
