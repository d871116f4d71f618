package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	intruderImage = "localhost/ctrlmesh/intruder:dev"
	intruderName  = "intruder"

	// What an agent or a manager under attack may take of the memory that it is allowed,
	// and how long others may wait for it: of its own processor time it has as much as ever.
	maxMeshMemory = 400 << 20
	maxLatency    = 2 * time.Second
	maxSlower     = 4 // times what it was before, where that is more
)

// fairness is what the apiserver itself answers where it has too much to do, which an
// intruder can bring about without a mesh.
const fairness = "Too many requests, please try again later."

// floods are the kinds that the intruder knows.
var floods = []string{"connections", "garbage", "handshakes", "slowloris", "headers", "resets", "streams"}

// hostile lets a member's root do its worst, with the rights over its own network
// that a pod can be given: to the mesh, to other pods by it, and round it.
func hostile(ctx context.Context, w *world, r *result) error {
	members, err := w.fleet(ctx, r)
	if err != nil {
		return err
	}
	node := w.nodes[0]
	victim := members[slices.IndexFunc(members, func(m *member) bool {
		return m.Spec.NodeName == node && m.way == "ebpf" && m.policy == closed
	})]
	begun, err := w.mark()
	if err != nil {
		return err
	}
	decoy, err := w.decoy(ctx, victim.Namespace)
	if err != nil {
		return err
	}
	if err := w.intruder(ctx, victim); err != nil {
		return err
	}
	attack := func(name string, do func() (string, error)) {
		r.of++
		why, err := do()
		if err != nil {
			r.doubt("hostile: %s: %v", name, err)
			w.say("  ! %s: %v", name, err)
			return
		}
		r.held++
		w.say("  %s: %s", name, why)
	}
	intrude := func(args ...string) func() (string, error) {
		return func() (string, error) { return w.intrude(ctx, victim.Namespace, args...) }
	}
	attack("other pods' packets", intrude("sniff"))
	attack("the mesh's listener", intrude("join"))
	attack("ways round the redirection", intrude("forge"))
	attack("another pod's token", intrude("borrow", "/token/token"))
	attack("another address", func() (string, error) {
		why, err := w.intrude(ctx, victim.Namespace, "misdirect", decoy.address)
		if err != nil {
			return "", err
		}
		n, err := w.visitors(ctx, decoy)
		if err == nil && n > 0 {
			err = fmt.Errorf("the decoy had %d visitors", n)
		}
		return why, err
	})
	for _, kind := range floods {
		attack("a flood of "+kind, func() (string, error) {
			return w.bystander(ctx, victim, func(ctx context.Context) (string, error) {
				return w.intrude(ctx, victim.Namespace, "flood", kind)
			})
		})
	}
	if err := outsiders(ctx, w, victim, attack); err != nil {
		return err
	}
	requests, err := w.requests(begun, victim.Namespace+"/"+intruderName)
	if err != nil {
		return err
	}
	leaked, err := w.leaks(ctx, requests, nil)
	if err != nil {
		return err
	}
	if len(leaked) > 0 {
		r.doubt("hostile: %d requests of the intruder went around the mesh", len(leaked))
	}
	return w.fleetWorks(ctx, time.Now())
}

// intruder makes a member of the victim's shard with root's rights over its network,
// and with a token of the victim's.
func (w *world) intruder(ctx context.Context, victim *member) error {
	token, err := w.Clientset.CoreV1().ServiceAccounts(victim.Namespace).CreateToken(ctx, probeAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: victim.Name, UID: victim.UID,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("making a token of %s: %w", victim.Name, err)
	}
	// An account of its own, without rights: the apiserver's fairness is between
	// accounts, and it is not the apiserver that is to be exhausted.
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: victim.Namespace, Name: intruderName}}
	p := pod(victim.Namespace, intruderName, victim.policy, victim.way, victim.Spec.NodeName, "sleep", "1000000")
	p.Spec.ServiceAccountName = account.Name
	c := &p.Spec.Containers[0]
	c.Image = intruderImage
	c.SecurityContext = &corev1.SecurityContext{
		RunAsUser:    new(int64),
		Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NET_RAW", "NET_ADMIN"}},
	}
	// Its own work must not be what slows others down.
	c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("250m")}
	c.VolumeMounts = []corev1.VolumeMount{{Name: "token", MountPath: "/token"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "borrowed"}}}}
	err = w.create(ctx, account, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: victim.Namespace, Name: "borrowed"},
		StringData: map[string]string{"token": token.Status.Token},
	}, p)
	if err != nil {
		return err
	}
	return w.podReady(ctx, p)
}

func (w *world) podReady(ctx context.Context, p *corev1.Pod) error {
	return w.until(ctx, "pod "+p.Name, func(ctx context.Context) error {
		err := w.Get(ctx, client.ObjectKeyFromObject(p), p)
		if err == nil && !kube.PodReady(p) {
			err = fmt.Errorf("it is %s and not ready", p.Status.Phase)
		}
		return err
	})
}

// intrude makes one attack. An error says how it succeeded, or why it was none.
func (w *world) intrude(ctx context.Context, namespace string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	stdout, _, err := w.Exec(ctx, namespace, intruderName, "", append([]string{"intruder"}, args...)...)
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
	const enough = 150
	return v.Why[:min(enough, len(v.Why))], nil
}

// bystander attacks, and looks at a member of the node that needs its agent meanwhile.
func (w *world) bystander(ctx context.Context, victim *member, attack func(context.Context) (string, error)) (string, error) {
	const before = 3 * time.Second
	start := time.Now()
	node := victim.Spec.NodeName
	pid, err := w.agentPID(ctx, node)
	if err != nil {
		return "", err
	}
	if _, err := victim.await(ctx, "some calm", start.Add(before), beat.meshed); err != nil {
		return "", err
	}
	calm, _, err := victim.latency(start, time.Now())
	if err != nil {
		return "", err
	}

	began := time.Now()
	flooding, stop := context.WithCancel(ctx)
	defer stop()
	memory := make(chan int64, 1)
	go func() { memory <- w.peakMemory(flooding, node, pid) }()
	why, err := attack(flooding)
	stop()
	peak := <-memory
	if err != nil {
		return "", err
	}
	if after, err := w.agentPID(ctx, node); err != nil || after != pid {
		return "", fmt.Errorf("the agent died of it: %w", errors.Join(err, errors.New("another runs")))
	}
	if _, err := victim.await(ctx, "an answer after it", time.Now(), beat.meshed); err != nil {
		return "", err
	}
	slow, failed, err := victim.latency(began, time.Now())
	switch {
	case err != nil:
		return "", err
	case failed != "":
		return "", fmt.Errorf("a request of %s failed: %s", victim.Name, failed)
	case slow > max(maxLatency, maxSlower*calm):
		return "", fmt.Errorf("%s waited %v, %v before", victim.Name, slow, calm)
	case peak == 0 || peak > maxMeshMemory:
		return "", fmt.Errorf("the agent took %d MiB", peak>>20)
	}
	return fmt.Sprintf("%s; the agent took %d MiB, others waited %v, %v before", why, peak>>20, slow.Round(time.Millisecond), calm.Round(time.Millisecond)), nil
}

// latency is how long a member waited at worst, but for one request of a hundred,
// and a request that failed.
func (m *member) latency(from, to time.Time) (worst time.Duration, failed string, err error) {
	all, err := m.asked()
	if err != nil {
		return 0, "", err
	}
	var took []time.Duration
	for _, b := range stretch(all, from, to) {
		took = append(took, b.end().Sub(b.Start))
		refusedAbove := b.Code == http.StatusTooManyRequests && strings.Contains(b.Error, fairness)
		if !b.good() && !refusedAbove {
			failed = b.String()
		}
	}
	if len(took) == 0 {
		return 0, "", fmt.Errorf("%s did not ask", m.Name)
	}
	return percentile(took, 0.99), failed, nil
}

// peakMemory is the most that a process held until ctx ended, by looks at it.
func (w *world) peakMemory(ctx context.Context, node, pid string) (peak int64) {
	for ctx.Err() == nil {
		out, err := w.NodeExec(ctx, node, "grep", "VmRSS", "/proc/"+pid+"/status")
		if fields := strings.Fields(out); err == nil && len(fields) == 3 {
			if kib, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				peak = max(peak, kib<<10)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(250 * time.Millisecond):
		}
	}
	return peak
}

// decoy is a server that counts who connects to it, and has nothing to say.
type decoy struct {
	*corev1.Pod
	address string
}

func (w *world) decoy(ctx context.Context, namespace string) (decoy, error) {
	p := pod(namespace, "decoy", "", "", w.nodes[1], "sh", "-c", "touch /tmp/visitors; exec nc -ll -p 8443 -e sh -c 'echo >>/tmp/visitors'")
	p.Labels, p.Annotations = nil, nil // not on the mesh
	p.Spec.Containers[0].Image = netImage
	p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
		Exec: &corev1.ExecAction{Command: []string{"sh", "-c", "netstat -ltn | grep -q :8443"}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	if err := w.create(ctx, p); err != nil {
		return decoy{}, err
	}
	if err := w.podReady(ctx, p); err != nil {
		return decoy{}, err
	}
	d := decoy{p, net.JoinHostPort(p.Status.PodIP, "8443")}
	// Who goes there is seen.
	if _, _, err := w.Exec(ctx, namespace, p.Name, "", "sh", "-c", "nc "+p.Status.PodIP+" 8443 </dev/null"); err != nil {
		return decoy{}, err
	}
	return d, w.until(ctx, "the decoy's first visitor", func(ctx context.Context) error {
		n, err := w.countVisitors(ctx, d)
		if err == nil && n != 1 {
			err = fmt.Errorf("it had %d", n)
		}
		return err
	})
}

// visitors are those but for the first, who proves that they are counted.
func (w *world) visitors(ctx context.Context, d decoy) (int, error) {
	n, err := w.countVisitors(ctx, d)
	return n - 1, err
}

func (w *world) countVisitors(ctx context.Context, d decoy) (int, error) {
	out, _, err := w.Exec(ctx, d.Namespace, d.Name, "", "cat", "/tmp/visitors")
	return strings.Count(out, "\n"), err
}
