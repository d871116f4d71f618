package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	metricsPort = "8080" // of managers
	webhookPort = "9443"
	streamPort  = "8443"
)

// exhaustion is an attack on a port of the mesh that any pod can connect to.
type exhaustion struct {
	port, scheme, path string
	kinds              []string // as the intruder knows them
}

var (
	agentExhaustions   = []exhaustion{{"9090", "http", "/metrics", []string{"stalled", "heads", "bodies", "unread"}}}
	managerExhaustions = []exhaustion{
		{metricsPort, "http", "/metrics", []string{"stalled", "heads", "unread"}},
		{webhookPort, "https", "/mutate-pod", []string{"stalled", "heads", "bodies", "reviews"}},
		{streamPort, "https", "/ctrlmesh.mesh.v1.Mesh/Connect", []string{"idle", "streams"}},
	}
)

// outsiders attack the ports of agents and managers from a namespace that is no member's.
func outsiders(ctx context.Context, w *world, victim *member, attack func(name string, do func() (string, error))) error {
	home, err := w.outsider(ctx, victim.Spec.NodeName)
	if err != nil {
		return err
	}
	agent, err := w.agentPod(ctx, victim.Spec.NodeName)
	if err != nil {
		return err
	}
	managers, err := w.meshPods(ctx, kube.ManagerName)
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
				attack(fmt.Sprintf("port %s by %s", e.port, kind), func() (string, error) {
					return w.outlast(ctx, victim, func(ctx context.Context) (string, error) {
						return w.intrude(ctx, home, append([]string{"exhaust", kind}, targets...)...)
					})
				})
			}
		}
	}
	return nil
}

// urls are an exhaustion's at some pods.
func (e exhaustion) urls(pods []corev1.Pod) (urls []string) {
	for _, p := range pods {
		urls = append(urls, fmt.Sprintf("%s://%s%s", e.scheme, net.JoinHostPort(p.Status.PodIP, e.port), e.path))
	}
	return urls
}

// outsider makes an intruder that is not on the mesh, without any right, in a namespace
// of its own, and returns that.
func (w *world) outsider(ctx context.Context, node string) (string, error) {
	home, err := w.namespace(ctx, "outsider")
	if err != nil {
		return "", err
	}
	p := pod(home, intruderName, "", "", node, "sleep", "1000000")
	p.Labels, p.Annotations = nil, nil
	p.Spec.ServiceAccountName, p.Spec.AutomountServiceAccountToken = "", new(bool)
	c := &p.Spec.Containers[0]
	c.Image = intruderImage
	// Its own work must not be what slows others down.
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("250m")}
	if err := w.create(ctx, p); err != nil {
		return "", err
	}
	return home, w.podReady(ctx, p)
}

// meshPods are the running pods of a workload of the mesh.
func (w *world) meshPods(ctx context.Context, name string) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := w.List(ctx, &pods, client.InNamespace(kube.SystemNamespace), client.MatchingLabels{"app.kubernetes.io/name": name}); err != nil {
		return nil, fmt.Errorf("listing the pods of %s: %w", name, err)
	}
	running := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning
	})
	if len(running) == 0 {
		return nil, fmt.Errorf("no pod of %s runs", name)
	}
	return running, nil
}

// outlast attacks, and checks that agents and managers still serve others: a member of
// the victim's node, readers of metrics, and the apiserver that admits members.
func (w *world) outlast(ctx context.Context, victim *member, attack func(context.Context) (string, error)) (string, error) {
	before, err := w.meshLives(ctx)
	if err != nil {
		return "", err
	}
	peaks := make([]int64, len(w.nodes))
	attacked := func(ctx context.Context) (string, error) {
		var watching sync.WaitGroup
		watched, stop := context.WithCancel(ctx)
		defer stop()
		for i, node := range w.nodes {
			if pid, err := w.NodeExec(ctx, node, "pidof", "-s", "ctrlmesh-manager"); err == nil {
				watching.Go(func() { peaks[i] = w.peakMemory(watched, node, strings.TrimSpace(pid)) })
			}
		}
		var served error
		watching.Go(func() { served = w.serves(watched, victim) })
		why, err := attack(ctx)
		stop()
		watching.Wait()
		return why, errors.Join(err, served)
	}
	why, err := w.bystander(ctx, victim, attacked)
	if err != nil {
		return "", err
	}
	if peak := slices.Max(peaks); peak == 0 || peak > maxMeshMemory {
		return "", fmt.Errorf("a manager took %d MiB", peak>>20)
	}
	after, err := w.meshLives(ctx)
	if err != nil {
		return "", err
	}
	if !slices.Equal(before, after) {
		return "", fmt.Errorf("pods of the mesh restarted: %v, then %v", before, after)
	}
	return fmt.Sprintf("%s; managers took %d MiB", why, slices.Max(peaks)>>20), nil
}

// meshLives are the lives of the mesh's containers, sorted: one that restarts has another.
func (w *world) meshLives(ctx context.Context) (lives []string, err error) {
	for _, name := range []string{kube.AgentName, kube.ManagerName} {
		pods, err := w.meshPods(ctx, name)
		if err != nil {
			return nil, err
		}
		for _, p := range pods {
			for _, c := range p.Status.ContainerStatuses {
				lives = append(lives, fmt.Sprintf("%s/%s %d", p.Name, c.Name, c.RestartCount))
			}
		}
	}
	slices.Sort(lives)
	return lives, nil
}

// serves reports, when ctx has ended, what agents and managers did not do for others
// meanwhile.
func (w *world) serves(ctx context.Context, victim *member) error {
	const every, within = time.Second, 10 * time.Second
	attempt := func(what string, do func(context.Context) error) error {
		each, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
		defer cancel()
		if err := do(each); err != nil {
			return fmt.Errorf("%s under attack: %w", what, err)
		}
		return nil
	}
	for ctx.Err() == nil {
		err := errors.Join(
			attempt("reading an agent's metrics", func(ctx context.Context) error { return w.connected(ctx, victim.Spec.NodeName) }),
			attempt("reading a manager's metrics", w.scrapeManagers),
			attempt("admitting a member", func(ctx context.Context) error {
				p := pod(victim.Namespace, "dry-run", victim.policy, victim.way, victim.Spec.NodeName, "true")
				return w.Create(ctx, p, client.DryRunAll)
			}),
		)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(every):
		}
	}
	return nil
}

// connected returns an error unless the agent of a node has a manager.
func (w *world) connected(ctx context.Context, node string) error {
	n, err := w.metric(ctx, node, "ctrlmesh_agent_manager_connected")
	if err == nil && n != 1 {
		err = errors.New("the agent has lost its manager")
	}
	return err
}

func (w *world) scrapeManagers(ctx context.Context) error {
	managers, err := w.meshPods(ctx, kube.ManagerName)
	if err != nil {
		return err
	}
	for _, m := range managers {
		if _, err := w.Clientset.CoreV1().Pods(m.Namespace).ProxyGet("http", m.Name, metricsPort, "/metrics", nil).DoRaw(ctx); err != nil {
			return fmt.Errorf("reading the metrics of %s: %w", m.Name, err)
		}
	}
	return nil
}
