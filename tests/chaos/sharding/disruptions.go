package sharding

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/harness/operator"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

const (
	// killManagerEvery is the minimum between two kills of the manager. Without a manager the
	// lock of an operator that is being adopted is not acquired, so that no member leads.
	killManagerEvery = time.Minute
	// disruptAgentsEvery is the minimum between two disruptions of agents. A first grant waits
	// 65 s for writes whose responses are lost.
	disruptAgentsEvery = 75 * time.Second
)

// siteDisruption is what disrupts an operator, or the mesh.
type siteDisruption struct {
	name  string
	cause disruption
	every time.Duration // the minimum between two with the same minimum, since all operators suffer
}

// siteDisruptions are what disrupts operators and the mesh while configurations change.
var siteDisruptions = []siteDisruption{
	{"an operator killed", killPod, 0},
	{"an operator killed", killPod, 0},
	{"an operator's pod deleted", deletePod, 0},
	{"an agent killed", killAgent, disruptAgentsEvery},
	{"the manager killed", killManager, killManagerEvery},
	{"an agent cut off", partitionAgent, disruptAgentsEvery},
}

// disruptAll disrupts random operators and the mesh until ctx ends. mean is the mean time between
// two tries.
func disruptAll(ctx context.Context, seed uint64, mean time.Duration, causes []siteDisruption, operators []*shardedOperator) error {
	random := rand.New(rand.NewPCG(seed, 0))
	last := map[time.Duration]time.Time{}
	for {
		if kube.Sleep(ctx, time.Duration(random.Int64N(int64(2*mean)))) != nil {
			return nil
		}
		o, d := operators[random.IntN(len(operators))], causes[random.IntN(len(causes))]
		start := time.Now()
		if start.Sub(last[d.every]) < d.every {
			continue
		}
		err := d.cause(ctx, o, random)
		last[d.every] = time.Now()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%s: %s: %w", o.Part, d.name, err)
		}
		o.Logf("  %s: %s, %v", o.Part, d.name, time.Since(start).Round(100*time.Millisecond))
	}
}

// beside runs do and, until it ends or a time has passed, all that disturbs it.
func beside(ctx context.Context, d time.Duration, do func(disturbing context.Context) error, disturb ...func(context.Context) error) error {
	disturbing, stop := context.WithTimeout(ctx, d)
	defer stop()
	ended := make(chan error, len(disturb))
	for _, one := range disturb {
		go func() { ended <- one(disturbing) }()
	}
	err := do(disturbing)
	stop()
	for range disturb {
		err = errors.Join(err, <-ended)
	}
	return err
}

// somePod returns a ready pod of the operator, one of those with the fewest restarts: the
// kubelet's back-off grows with restarts and is not measured here.
func (o *shardedOperator) somePod(ctx context.Context, random *rand.Rand) (pod *corev1.Pod, err error) {
	err = o.Until(ctx, "an operator that runs", func(ctx context.Context) error {
		pods, err := o.Pods(ctx)
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

// killPod kills the process in a pod of the operator. A pod that ends meanwhile is not it.
func killPod(ctx context.Context, o *shardedOperator, random *rand.Rand) error {
	return o.Until(ctx, "an operator to be killed", func(ctx context.Context) error {
		pod, err := o.somePod(ctx, random)
		if err != nil {
			return err
		}
		if _, err = o.KillProcess(ctx, pod, operator.Name); err == nil {
			o.counts.kills++
		}
		return err
	})
}

// deletePod deletes a pod of the operator.
func deletePod(ctx context.Context, o *shardedOperator, random *rand.Rand) error {
	pod, err := o.somePod(ctx, random)
	if err != nil {
		return err
	}
	o.counts.kills++
	return failure.Wrap(client.IgnoreNotFound(o.Delete(ctx, pod)), "deleting %s", pod.Name)
}

// killAgent kills the agent of a node and waits until another runs.
func killAgent(ctx context.Context, o *shardedOperator, random *rand.Rand) error {
	node := o.Nodes[random.IntN(len(o.Nodes))]
	pid, err := o.AgentPID(ctx, node)
	if err != nil {
		return err
	}
	o.counts.kills++
	if _, err := o.Signal(ctx, node, pid, "KILL"); err != nil {
		return err
	}
	_, err = o.WaitAgentRestart(ctx, node, pid)
	return err
}

// killManager kills the manager that leads.
func killManager(ctx context.Context, o *shardedOperator, _ *rand.Rand) error {
	pod, err := o.LeadingManager(ctx)
	if err != nil {
		return err
	}
	o.counts.kills++
	_, err = o.KillProcess(ctx, pod, kube.ManagerName)
	return err
}

// partitionAgent drops all packets between a node's agent and the manager for a while.
func partitionAgent(ctx context.Context, o *shardedOperator, random *rand.Rand) (err error) {
	restore, err := o.CutOffAgent(ctx, o.Nodes[random.IntN(len(o.Nodes))])
	if restore != nil {
		defer func() { err = errors.Join(err, restore()) }()
	}
	if err != nil {
		return err
	}
	o.counts.partitions++
	return kube.Sleep(ctx, partitionFor) // the duration is part of the test
}

func restartAPIServer(ctx context.Context, o *shardedOperator, _ *rand.Rand) error {
	if err := o.NodeScript(ctx, "stop", "kube-apiserver"); err != nil {
		return err
	}
	o.APIServerRestarts = append(o.APIServerRestarts, time.Now())
	return o.NodeScript(context.WithoutCancel(ctx), "start", "kube-apiserver")
}
