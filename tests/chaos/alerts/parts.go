package alerts

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	// addressPort is the port of an agent for pods captured by address.
	addressPort = "6443"
	// A redirection is removed once in flushPause at first, and is repaired meanwhile. Later it is removed all the
	// time, and stays lost.
	flushEvery, flushPause, flushOften = 100 * time.Millisecond, 40, 400
	// requests sends one a second from a pod, and ends with it.
	requests = `while :; do gonet get -k -token /var/run/secrets/kubernetes.io/serviceaccount/token "$@" >/dev/null; sleep 1; done`
)

// cutOff cuts an agent off from the manager while shards are removed and a pod starts on its node.
func (s *suite) cutOff(ctx context.Context, p *provocation) error {
	return s.Run(ctx, "cut-off", operator.NewSpec(2, meshv1alpha1.OnChangeRestart), func(ctx context.Context, o *operator.Operator) (err error) {
		node := s.Nodes[1]
		restore, err := s.CutOffAgent(ctx, node)
		if restore != nil {
			defer func() { err = errors.Join(err, restore(), o.WaitSettled(context.WithoutCancel(ctx))) }()
		}
		if err != nil {
			return err
		}
		if err := o.Change(ctx, func(spec *meshv1alpha1.ShardingConfigSpec) { spec.Root.Auto.ShardingSize = 1 }); err != nil {
			return err
		}
		late := harness.NewPod(o.Home, "late", "none", meshv1alpha1.CaptureEBPF, node, "sh", "-c", requests, "sh", "https://kubernetes.default/api/v1/namespaces/default/configmaps")
		late.Spec.Containers[0].Image = harness.NetImage
		if err := s.CreateAll(ctx, late); err != nil {
			return err
		}
		return p.fires(ctx)
	})
}

// member starts a pod of a shard that was written by hand.
func (s *suite) member(ctx context.Context, part, image string) (*corev1.Pod, error) {
	home, err := s.CreatePodNamespace(ctx, part)
	if err != nil {
		return nil, err
	}
	f := &fleet.Fleet{Testbed: s.Testbed}
	if _, err := f.CreateShard(ctx, home, part, meshv1alpha1.FailClosed); err != nil {
		return nil, err
	}
	pod := harness.NewPod(home, "member", part, meshv1alpha1.CaptureEBPF, s.Nodes[0], "sleep", "1000000")
	pod.Spec.Containers[0].Image = image
	return pod, s.CreateReady(ctx, pod)
}

// foreign has a member write an object of another shard, and use the token of another pod.
func (s *suite) foreign(ctx context.Context, p *provocation) error {
	pod, err := s.member(ctx, "foreign", harness.NetImage)
	if err != nil {
		return err
	}
	other := harness.NewPlainPod(pod.Namespace, "other", harness.NetImage, pod.Spec.NodeName, "sleep", "1000000")
	if err := s.CreateReady(ctx, other); err != nil {
		return err
	}
	token, err := s.TokenOf(ctx, other)
	if err != nil {
		return err
	}
	const configmaps = "https://kubernetes.default/api/v1/namespaces/default/configmaps"
	return s.during(ctx, p, []corev1.Pod{*pod}, requests+" & "+`while :; do gonet get -k -H "Authorization: Bearer $0" `+configmaps+`; sleep 1; done`, token, "-X", "DELETE", configmaps+"/kube-root-ca.crt")
}

// strangers has a pod outside the mesh connect to the address of an agent for its captured pods.
func (s *suite) strangers(ctx context.Context, p *provocation) error {
	home, err := s.CreatePodNamespace(ctx, "strangers")
	if err != nil {
		return err
	}
	agent, err := s.AgentPod(ctx, s.Nodes[0])
	if err != nil {
		return err
	}
	stranger := harness.NewPlainPod(home, "stranger", harness.NetImage, s.Nodes[0], "sleep", "1000000")
	if err := s.CreateReady(ctx, stranger); err != nil {
		return err
	}
	return s.during(ctx, p, []corev1.Pod{*stranger}, `while :; do gonet tcp "$0"; sleep 1; done`, net.JoinHostPort(agent.Status.PodIP, addressPort))
}

// bounds has a member open more connections than one may have.
func (s *suite) bounds(ctx context.Context, p *provocation) error {
	pod, err := s.member(ctx, "bounds", "localhost/ctrlmesh/intruder:dev")
	if err != nil {
		return err
	}
	return s.during(ctx, p, []corev1.Pod{*pod}, "while :; do intruder flood connections; done")
}

// losses removes the redirection of a member, again and again.
func (s *suite) losses(ctx context.Context, p *provocation) error {
	home, err := s.CreatePodNamespace(ctx, "losses")
	if err != nil {
		return err
	}
	pod := harness.NewPod(home, "member", "none", meshv1alpha1.CaptureIPTables, s.Nodes[0], "sleep", "1000000")
	pod.Spec.Containers[0].Image = harness.NetImage
	if err := s.CreateReady(ctx, pod); err != nil {
		return err
	}
	flushing, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		kube.Every(flushing, flushEvery, func(ctx context.Context, n int) {
			if n%flushPause == 0 || n > flushOften {
				_, _ = s.NetnsExec(ctx, pod, "iptables", "-t", "nat", "-F") // the alerts say whether it succeeded
			}
		})
	}()
	err = p.fires(ctx)
	stop()
	<-ended
	return errors.Join(err, s.Delete(context.WithoutCancel(ctx), pod))
}

// apiserver stops the apiserver while a member asks it.
func (s *suite) apiserver(ctx context.Context, p *provocation) error {
	pod, err := s.member(ctx, "apiserver", harness.NetImage)
	if err != nil {
		return err
	}
	if _, err := s.Kubectl(ctx, "-n", pod.Namespace, "exec", pod.Name, "--", "sh", "-c", "("+requests+") >/dev/null 2>&1 &", "sh", "https://kubernetes.default/api/v1/namespaces/default/configmaps"); err != nil {
		return err
	}
	if err := s.NodeScript(ctx, "stop", "kube-apiserver"); err != nil {
		return err
	}
	err = p.fires(ctx)
	err = errors.Join(err, s.NodeScript(context.WithoutCancel(ctx), "start", "kube-apiserver"))
	return errors.Join(err, s.Until(ctx, "the mesh's return", s.MeshReady), client.IgnoreNotFound(s.Delete(context.WithoutCancel(ctx), pod)))
}

// undivided has the members of two shards write objects that the root does not divide.
func (s *suite) undivided(ctx context.Context, p *provocation) (err error) {
	if err := s.ApplyCRD(ctx); err != nil {
		return err
	}
	o, err := s.Prepare(ctx, "undivided")
	if o != nil {
		defer func() { err = errors.Join(err, o.Remove(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return err
	}
	const secret = "undivided"
	err = s.CreateAll(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: o.Home, Name: secret}}, o.NewRoot(operator.NewSpec(2, meshv1alpha1.OnChangeRestart)))
	if err != nil {
		return err
	}
	err = o.CreateStatefulSet(ctx, 2, func(set *appsv1.StatefulSet) {
		main := &set.Spec.Template.Spec.Containers[0]
		*main = corev1.Container{Name: main.Name, Image: harness.NetImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: []string{"sleep", "1000000"}}
	})
	if err != nil {
		return err
	}
	if err := o.WaitSettled(ctx); err != nil {
		return err
	}
	pods, err := o.Pods(ctx)
	if err != nil {
		return err
	}
	const script = `while :; do gonet get -k -token /var/run/secrets/kubernetes.io/serviceaccount/token -X PATCH -H "Content-Type: application/merge-patch+json" -d "{\"metadata\":{\"annotations\":{\"by\":\"$HOSTNAME $(date +%s)\"}}}" "$0" >/dev/null; sleep 1; done`
	return s.during(ctx, p, pods, script, "https://kubernetes.default/api/v1/namespaces/"+o.Home+"/secrets/"+secret)
}

// during runs a script in pods until the alerts have fired. Then it deletes the pods.
func (s *suite) during(ctx context.Context, p *provocation, pods []corev1.Pod, script string, args ...string) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, len(pods))
	for _, pod := range pods {
		go func() {
			_, stderr, err := s.Exec(running, pod.Namespace, pod.Name, pod.Spec.Containers[0].Name, append([]string{"sh", "-c", script}, args...)...)
			ended <- fmt.Errorf("the script has ended: %w: %s", err, stderr)
		}()
	}
	err := p.fires(ctx)
	select {
	case failed := <-ended:
		err = errors.Join(err, failed)
	default:
	}
	for _, pod := range pods {
		err = errors.Join(err, client.IgnoreNotFound(s.Delete(context.WithoutCancel(ctx), &pod)))
	}
	return err
}
