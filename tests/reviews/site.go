package reviews

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	v1 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v1"
	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

// The versions of the operator, which are the names of their Deployments. Next is a subset of
// the configuration, and owns the namespaces that are labelled. Stable owns all others.
const (
	Next   = "next"
	Stable = "stable"
)

// Port is that of the webhooks.
const Port = 9443

// Replicas is the number of pods of each version.
const Replicas = 2

// within bounds a wait for what takes seconds on an idle machine.
const within = 4 * time.Minute

// AddToScheme adds the kind that the operator reviews, in both versions.
func AddToScheme(scheme *runtime.Scheme) error {
	return errors.Join(v1.AddToScheme(scheme), v2.AddToScheme(scheme))
}

// Site is an installation of the operator.
type Site struct {
	*kube.Cluster
	Home string // namespace

	account   string // service account of its pods
	authority *authority
	outside   *corev1.Pod // a client that is not on the mesh
	// dial connects to an address as from that client.
	dial   func(ctx context.Context, address string) (net.Conn, error)
	nudges int
}

func (s *Site) serverName() string { return service + "." + s.Home + ".svc" }

// Own returns the owner of a namespace: its label gives it to Next, or its absence to Stable.
func (s *Site) Own(ctx context.Context, namespace, version string) error {
	value := "null"
	if version == Next {
		value = fmt.Sprintf("%q", s.Home)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, versionLabel, value)
	if err := s.Patch(ctx, ns, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("labelling namespace %s: %w", namespace, err)
	}
	return nil
}

// Root returns the configuration.
func (s *Site) Root(ctx context.Context) (*meshv1alpha1.ShardingConfig, error) {
	root := &meshv1alpha1.ShardingConfig{}
	return root, s.Get(ctx, client.ObjectKey{Namespace: s.Home, Name: configName}, root)
}

// AwaitSettled waits until both versions have their namespaces.
func (s *Site) AwaitSettled(ctx context.Context) error {
	return kube.UntilWithin(ctx, within, "the shards of the operator", func(ctx context.Context) error {
		root, err := s.Root(ctx)
		if err != nil {
			return err
		}
		return kube.Settled(root, 2)
	})
}

// Pods returns the ready pods of a version.
func (s *Site) Pods(ctx context.Context, version string) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := s.List(ctx, &pods, client.InNamespace(s.Home), client.MatchingLabels{appLabel: version, operatorLabel: service}); err != nil {
		return nil, fmt.Errorf("listing the pods of version %s: %w", version, err)
	}
	ready := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return !kube.PodReady(&p) })
	if len(ready) != Replicas {
		return nil, fmt.Errorf("version %s has %d ready pods, not %d", version, len(ready), Replicas)
	}
	return ready, nil
}

// EachPod calls f with each pod of both versions.
func (s *Site) EachPod(ctx context.Context, f func(pod *corev1.Pod, version string) error) error {
	for _, version := range []string{Next, Stable} {
		pods, err := s.Pods(ctx, version)
		if err != nil {
			return err
		}
		for i := range pods {
			if err := f(&pods[i], version); err != nil {
				return err
			}
		}
	}
	return nil
}

// AwaitRouted waits until each pod routes reviews about some namespaces, by their owners, the
// apiserver sends reviews, and no client has a connection that bypasses an agent.
func (s *Site) AwaitRouted(ctx context.Context, owners map[string]string) error {
	return kube.UntilWithin(ctx, within, "reviews to be routed", func(ctx context.Context) error {
		for namespace, owner := range owners {
			o := s.create(ctx, v2Version, namespace, nil, true)
			if o.Err != nil || o.Mutated.Version != owner || o.Validated.Version != owner {
				return fmt.Errorf("a create in %s, which %s owns: %+v", namespace, owner, o)
			}
		}
		err := s.EachPod(ctx, func(pod *corev1.Pod, version string) error { return s.Routes(ctx, pod, version, owners) })
		if err != nil {
			return err
		}
		return s.EachPod(ctx, func(pod *corev1.Pod, _ string) error {
			routed, err := s.routed(ctx, pod)
			if err == nil && !routed {
				err = fmt.Errorf("the agent of pod %s does not route all reviews", pod.Name)
			}
			return err
		})
	})
}

// Interruptions returns how often the agent of a node has noticed that it did not route all
// reviews of a pod, by the pods there.
func (s *Site) Interruptions(ctx context.Context, node string) (map[string]float64, error) {
	agent, err := s.AgentPod(ctx, node)
	if err != nil {
		return nil, err
	}
	families, err := s.Scrape(ctx, agent)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	err = s.EachPod(ctx, func(pod *corev1.Pod, _ string) error {
		if pod.Spec.NodeName == node {
			out[pod.Name] = kube.Total(families["ctrlmesh_webhook_interruptions_total"], map[string]string{"namespace": pod.Namespace, "pod": pod.Name})
		}
		return nil
	})
	return out, err
}

// AwaitInterrupted waits until the agent of a node has noticed one more interruption of each pod
// there than before. From then on it says that it routes all reviews once it does again.
func (s *Site) AwaitInterrupted(ctx context.Context, node string, before map[string]float64) error {
	return kube.UntilWithin(ctx, within, "an agent to notice that it was stopped", func(ctx context.Context) error {
		now, err := s.Interruptions(ctx, node)
		if err != nil {
			return err
		}
		return interrupted(before, now)
	})
}

// interrupted returns an error unless each pod has been interrupted since.
func interrupted(before, now map[string]float64) error {
	for pod, n := range before {
		if now[pod] <= n {
			return fmt.Errorf("the agent has noticed no interruption of pod %s: %v, as before", pod, n)
		}
	}
	return nil
}

// routed reports whether the agent of a pod says that it routes all reviews of the pod.
func (s *Site) routed(ctx context.Context, pod *corev1.Pod) (bool, error) {
	agent, err := s.AgentPod(ctx, pod.Spec.NodeName)
	if err != nil {
		return false, err
	}
	families, err := s.Scrape(ctx, agent)
	return kube.Total(families["ctrlmesh_webhook_routed"], map[string]string{"namespace": pod.Namespace, "pod": pod.Name}) == 1, err
}

// Routes returns an error unless a pod answers reviews about namespaces of its own version by
// itself, and a pod of the owner the others.
func (s *Site) Routes(ctx context.Context, pod *corev1.Pod, version string, owners map[string]string) error {
	for namespace, owner := range owners {
		by, err := s.Ask(ctx, pod, namespace)
		if err != nil {
			return err
		}
		if by.Version != owner || owner == version && by.Pod != pod.Name {
			return fmt.Errorf("a review about %s, which %s owns, was sent to pod %s: %+v answered", namespace, owner, pod.Name, by)
		}
	}
	return nil
}

// Rotate replaces the certificate of the webhooks, and waits until all pods present it.
func (s *Site) Rotate(ctx context.Context) error {
	data, err := s.certificate()
	if err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.Home, Name: service}}
	if err := s.Get(ctx, client.ObjectKeyFromObject(secret), secret); err != nil {
		return fmt.Errorf("reading the certificate's Secret: %w", err)
	}
	secret.Data = data
	if err := s.Update(ctx, secret); err != nil {
		return fmt.Errorf("replacing the certificate: %w", err)
	}
	return kube.UntilWithin(ctx, within, "the certificate to be replaced in all pods", func(ctx context.Context) error {
		return s.EachPod(ctx, func(pod *corev1.Pod, _ string) error {
			serial, err := s.Presented(ctx, pod)
			if err != nil || serial == s.authority.issued {
				return err
			}
			return errors.Join(fmt.Errorf("pod %s presents number %d, not %d", pod.Name, serial, s.authority.issued), s.nudge(ctx, pod))
		})
	})
}

// nudge changes a pod, so that the kubelet updates its volumes now and not within a minute.
func (s *Site) nudge(ctx context.Context, pod *corev1.Pod) error {
	s.nudges++
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"reviewer.example.com/nudge":"%d"}}}`, s.nudges)
	return s.Patch(ctx, pod, client.RawPatch(types.MergePatchType, patch))
}

// AwaitUnrouted waits until the configuration reports that the reviews of a pod are not routed,
// and why.
func (s *Site) AwaitUnrouted(ctx context.Context, pod, why string) error {
	return s.awaitDegraded(ctx, func(c *metav1.Condition) bool {
		return c.Status == metav1.ConditionTrue && c.Reason == string(meshv1alpha1.ReasonWebhookNotRouted) &&
			strings.Contains(c.Message, pod) && strings.Contains(c.Message, why)
	})
}

// AwaitHealthy waits until the configuration reports no such pod any more.
func (s *Site) AwaitHealthy(ctx context.Context) error {
	return s.awaitDegraded(ctx, func(c *metav1.Condition) bool { return c.Status == metav1.ConditionFalse })
}

func (s *Site) awaitDegraded(ctx context.Context, want func(*metav1.Condition) bool) error {
	return kube.UntilWithin(ctx, within, "the configuration's condition", func(ctx context.Context) error {
		root, err := s.Root(ctx)
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(root.Status.Conditions, meshv1alpha1.ConditionDegraded)
		if c == nil || !want(c) {
			return fmt.Errorf("it is %+v", c)
		}
		return nil
	})
}
