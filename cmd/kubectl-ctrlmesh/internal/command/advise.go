package command

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/advise"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

func (e *environment) adviseCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "advise KIND/NAME", Short: "Say whether an operator can be divided, by its requests", Args: cobra.ExactArgs(1),
		Long:    "Say whether the operator of a StatefulSet or a Deployment can be divided, which resources its shards would divide, and what to know before. It reads the access lines of the operator's pods in the logs of agents, which log them if the value agent.accessLog of the chart is set. The pods must be on the mesh, but need no ShardingConfig.\n\nExit codes: 0 it can be divided by namespace, 1 it cannot or should not, 2 unknown.",
		Example: "  kubectl ctrlmesh advise statefulset/operator-demo\n  kubectl ctrlmesh advise deployment/operator-demo --for 10m",
	}
	since := c.Flags().Duration("since", time.Hour, "how far back logs are read, as far as the kubelet has them")
	during := c.Flags().Duration("for", 0, "also watch the operator for this long")
	c.RunE = func(c *cobra.Command, args []string) error {
		target, err := adoption.ParseTarget(args[0])
		if err != nil {
			return err
		}
		r, namespace, err := e.connect()
		if err != nil {
			return err
		}
		s, err := read(c.Context(), r, snapshot.Programs, snapshot.Configs(namespace), snapshot.Members(namespace), snapshot.Target(namespace, target))
		if err != nil {
			return err
		}
		agents, err := agentsOf(s, namespace, args[0])
		if err != nil {
			return err
		}
		profile, err := e.profile(c.Context(), s, agents, *since, *during)
		if err != nil {
			return err
		}
		lists, _, err := r.Served()
		if err != nil {
			return err
		}
		in := advise.Input{Profile: profile, Namespace: namespace, Workload: args[0], Served: resources.ServedBy(lists, nil)}
		if root := (adoption.Request{Namespace: namespace, Target: target}).Root(s); root != nil {
			in.Root = root.Name
		}
		advice := advise.Judge(in)
		if err := e.print(advice, advice.Findings() && advice.Verdict != advise.Unseen); err != nil {
			return err
		}
		if advice.Verdict == advise.Unseen {
			return errors.New("too little was seen of the operator")
		}
		return nil
	}
	return c
}

// agentsOf returns the agents that serve the pods of a workload, by name. It returns an error if a pod is
// not on the mesh, or its agent logs no access lines.
func agentsOf(s *snapshot.Snapshot, namespace, workload string) (map[string]*corev1.Pod, error) {
	w := s.Subjects.Workload
	switch {
	case w == nil:
		return nil, fmt.Errorf("there is no %s in namespace %s: name another namespace by -n", workload, namespace)
	case len(w.Pods) == 0:
		return nil, fmt.Errorf("%s has no pods: scale it up", workload)
	case w.Template[v1alpha1.EnableProxyLabel] != "true":
		return nil, fmt.Errorf("the pods of %s are not on the mesh: label its pod template by kubectl -n %s patch %s --type=merge -p '%s'; without a ShardingConfig their requests pass unchanged",
			workload, namespace, workload, adoption.LabelPatch(true))
	}
	out := map[string]*corev1.Pod{}
	for i := range w.Pods {
		agent, err := tap.Agent(s, namespace, w.Pods[i].Name)
		if err != nil {
			return nil, err
		}
		out[agent.Name] = agent
	}
	return out, nil
}

// profile reads what the pods of the workload did from the logs of agents.
func (e *environment) profile(ctx context.Context, s *snapshot.Snapshot, agents map[string]*corev1.Pod, since, during time.Duration) (*advise.Profile, error) {
	options := &corev1.PodLogOptions{SinceSeconds: new(int64(max(1, since.Seconds()))), Follow: during > 0}
	reading := ctx
	if options.Follow {
		var cancel context.CancelFunc
		reading, cancel = context.WithTimeout(ctx, during)
		defer cancel()
		fmt.Fprintf(e.ErrOut, "watching for %s\n", during)
	}
	pods := map[string]bool{}
	for i := range s.Subjects.Workload.Pods {
		pods[s.Subjects.Workload.Pods[i].Namespace+"/"+s.Subjects.Workload.Pods[i].Name] = true
	}
	var mu sync.Mutex
	out := &advise.Profile{}
	add := func(text []byte) error {
		if line, ok := tap.Parse(text); ok && pods[line.Pod] {
			mu.Lock()
			defer mu.Unlock()
			out.Add(line)
		}
		return nil
	}
	var all errgroup.Group
	for _, agent := range agents {
		all.Go(func() error {
			log, err := e.logs(reading, agent.Namespace, agent.Name, options)
			if err != nil {
				return fmt.Errorf("reading the log of %s: %w: you need permission to get pods/log in namespace %s", agent.Name, err, agent.Namespace)
			}
			defer log.Close()
			if err := tap.Lines(log, add); err != nil && reading.Err() == nil {
				return fmt.Errorf("reading the log of %s: %w", agent.Name, err)
			}
			return nil
		})
	}
	return out, errors.Join(all.Wait(), ctx.Err())
}
