package capture

import (
	"context"
	"fmt"
	"net"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	metricsPort = "8080" // of managers
	webhookPort = "9443"
	streamPort  = "8443"
)

// exhaustion is an attack on a port of the mesh to which any pod can connect.
type exhaustion struct {
	port, scheme, path string
	kinds              []string // arguments of the intruder
}

var (
	agentExhaustions   = []exhaustion{{"9090", "http", "/metrics", []string{"stalled", "heads", "bodies", "unread"}}}
	managerExhaustions = []exhaustion{
		{metricsPort, "http", "/metrics", []string{"stalled", "heads", "unread"}},
		{webhookPort, "https", "/mutate-pod", []string{"stalled", "heads", "bodies", "reviews"}},
		{streamPort, "https", "/ctrlmesh.mesh.v1.Mesh/Connect", []string{"idle", "streams"}},
	}
)

// attackFromOutside attacks the ports of agents and managers from a namespace without members.
func (s *suite) attackFromOutside(ctx context.Context, victim *fleet.Member, home string) error {
	agent, err := s.AgentPod(ctx, victim.Spec.NodeName)
	if err != nil {
		return err
	}
	managers, err := s.MeshPods(ctx, kube.ManagerName)
	if err != nil {
		return err
	}
	for _, at := range []struct {
		pods        []corev1.Pod
		exhaustions []exhaustion
	}{{[]corev1.Pod{*agent}, agentExhaustions}, {managers, managerExhaustions}} {
		for _, e := range at.exhaustions {
			targets := e.urls(at.pods)
			for _, kind := range e.kinds {
				s.attack(fmt.Sprintf("port %s by %s", e.port, kind), func() (string, error) {
					return s.withServices(ctx, victim, func(ctx context.Context) (string, error) {
						return s.intrude(ctx, home, append([]string{"exhaust", kind}, targets...)...)
					})
				})
			}
		}
	}
	return nil
}

// urls returns the URLs of the port on some pods.
func (e exhaustion) urls(pods []corev1.Pod) (urls []string) {
	for _, p := range pods {
		urls = append(urls, fmt.Sprintf("%s://%s%s", e.scheme, net.JoinHostPort(p.Status.PodIP, e.port), e.path))
	}
	return urls
}
