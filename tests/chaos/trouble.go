package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	cutFor      = 8 * time.Second // a partition: longer than anything waits for before it tries again
	managerPort = "8443"          // where agents are served
	stormSeed   = 4               // so that a run can be repeated
)

// troubles, and how often each comes in a storm.
var troubles = []struct {
	name  string
	times int
	cause func(context.Context, *operator, *rand.Rand, *shardingCounts) error
}{
	{"an operator killed", 8, killOperator},
	{"an operator's pod deleted", 6, deleteOperator},
	{"an agent killed", 6, killAgent},
	{"the manager killed", 3, killManager},
	{"an agent cut off", 4, cutOff},
	{"the apiserver restarted", 2, restartAPIServer},
}

// storm moves keys all the time while everything that can break does.
func storm(ctx context.Context, w *world, r *result) error {
	return w.withOperator(ctx, r, "storm", divided(5, meshv1alpha1.OnChangeRelist, firstTenant), func(ctx context.Context, o *operator) error {
		moving, stop := context.WithCancel(ctx)
		moved := make(chan error, 1)
		go func() { moved <- o.moveUntil(moving) }()
		err := o.troubled(ctx, &r.sharding)
		stop()
		return errors.Join(err, <-moved, o.settled(ctx))
	})
}

// moveUntil moves the canary until ctx ends. Each move must settle.
func (o *operator) moveUntil(ctx context.Context) error {
	for i := 0; ; i++ {
		err := o.moveCanary(ctx, i)
		if err == nil {
			err = o.settled(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("move %d of the canary: %w", i+1, err)
		}
	}
}

// troubled makes all troubles, in an order that does not change.
func (o *operator) troubled(ctx context.Context, c *shardingCounts) error {
	random := rand.New(rand.NewPCG(stormSeed, 0))
	var all []int
	for i, t := range troubles {
		for range t.times {
			all = append(all, i)
		}
	}
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, i := range all {
		// At any time of a move.
		select {
		case <-time.After(time.Duration(random.Int64N(int64(3 * time.Second)))):
		case <-ctx.Done():
			return ctx.Err()
		}
		start := time.Now()
		if err := troubles[i].cause(ctx, o, random, c); err != nil {
			return fmt.Errorf("%s: %w", troubles[i].name, err)
		}
		o.say("  %s, %v", troubles[i].name, time.Since(start).Round(100*time.Millisecond))
	}
	return nil
}

// somePod is one of the operator's that runs, of those that were started anew least
// often: the kubelet lets one wait ever longer, and that is not what is measured.
func (o *operator) somePod(ctx context.Context, random *rand.Rand) (pod *corev1.Pod, err error) {
	err = o.until(ctx, "an operator that runs", func(ctx context.Context) error {
		pods, err := o.pods(ctx)
		if err != nil {
			return err
		}
		pod = nil
		for _, i := range random.Perm(len(pods)) {
			if kube.PodReady(&pods[i]) && (pod == nil || kube.Restarts(&pods[i]) < kube.Restarts(pod)) {
				pod = &pods[i]
			}
		}
		if pod == nil {
			return errors.New("none is ready")
		}
		return nil
	})
	return pod, err
}

func killOperator(ctx context.Context, o *operator, random *rand.Rand, c *shardingCounts) error {
	pod, err := o.somePod(ctx, random)
	if err != nil {
		return err
	}
	c.kills++
	_, err = o.killProcess(ctx, pod, operatorName)
	return err
}

// killProcess ends the process of a name in a pod as the kernel would that is out of memory.
func (w *world) killProcess(ctx context.Context, pod *corev1.Pod, name string) (time.Time, error) {
	const find = `for p in $(pidof "$2"); do
  if grep -qs "pod$1" "/proc/$p/cgroup"; then echo "$p"; exit; fi
done
echo "no $2 runs in pod $1" >&2; exit 1`
	pid, err := w.NodeExec(ctx, pod.Spec.NodeName, "bash", "-c", find, "bash", string(pod.UID), name)
	if err != nil {
		return time.Time{}, err
	}
	return w.signal(ctx, pod.Spec.NodeName, strings.TrimSpace(pid), "KILL")
}

func deleteOperator(ctx context.Context, o *operator, random *rand.Rand, c *shardingCounts) error {
	pod, err := o.somePod(ctx, random)
	if err != nil {
		return err
	}
	c.kills++
	if err := o.Delete(ctx, pod); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("deleting %s: %w", pod.Name, err)
	}
	return nil
}

func killAgent(ctx context.Context, o *operator, random *rand.Rand, c *shardingCounts) error {
	node := o.nodes[random.IntN(len(o.nodes))]
	pid, err := o.agentPID(ctx, node)
	if err != nil {
		return err
	}
	c.kills++
	if _, err := o.signal(ctx, node, pid, "KILL"); err != nil {
		return err
	}
	_, err = o.agentReturned(ctx, node, pid)
	return err
}

// killManager ends the one that leads.
func killManager(ctx context.Context, o *operator, _ *rand.Rand, c *shardingCounts) error {
	var lease coordinationv1.Lease
	if err := o.Get(ctx, client.ObjectKey{Namespace: kube.SystemNamespace, Name: kube.ManagerName}, &lease); err != nil {
		return fmt.Errorf("finding the leader: %w", err)
	}
	name, _, _ := strings.Cut(*lease.Spec.HolderIdentity, "_")
	var pod corev1.Pod
	if err := o.Get(ctx, client.ObjectKey{Namespace: kube.SystemNamespace, Name: name}, &pod); err != nil {
		return fmt.Errorf("finding the leader: %w", err)
	}
	c.kills++
	_, err := o.killProcess(ctx, &pod, kube.ManagerName)
	return err
}

// cutOff loses what a node's agent and the manager say to each other, for a while.
func cutOff(ctx context.Context, o *operator, random *rand.Rand, c *shardingCounts) (err error) {
	agent, err := o.agentPod(ctx, o.nodes[random.IntN(len(o.nodes))])
	if err != nil {
		return err
	}
	rules := func(ctx context.Context, do string) error {
		for _, rule := range [][]string{{"OUTPUT", "-p", "tcp", "--dport"}, {"INPUT", "-p", "tcp", "--sport"}} {
			if _, err := o.inNetns(ctx, agent, append(append([]string{"iptables", do}, rule...), managerPort, "-j", "DROP")...); err != nil {
				return err
			}
		}
		return nil
	}
	defer func() { err = errors.Join(err, rules(context.WithoutCancel(ctx), "-D")) }()
	if err := rules(ctx, "-I"); err != nil {
		return err
	}
	c.partitions++
	select {
	case <-time.After(cutFor): // the time that it is cut off for is the test
	case <-ctx.Done():
	}
	return ctx.Err()
}

func restartAPIServer(ctx context.Context, o *operator, _ *rand.Rand, _ *shardingCounts) error {
	if err := o.nodeScript(ctx, "stop", "kube-apiserver"); err != nil {
		return err
	}
	o.restarts = append(o.restarts, time.Now())
	return o.nodeScript(context.WithoutCancel(ctx), "start", "kube-apiserver")
}
