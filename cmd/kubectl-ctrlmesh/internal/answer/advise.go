package answer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/advise"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
	"github.com/ctrlmesh/ctrlmesh/manager/resources"
)

// recently is how far back logs are read if nothing is recorded.
const recently = time.Hour

// Adviser says whether the operator of a workload can be divided.
type Adviser struct {
	Reader    snapshot.Reader
	Namespace string
	Workload  layout.Workload
	// Since is how far back logs are read. If it is 0, the record of the manager is read, or else what was
	// logged recently.
	Since time.Duration
	// During is for how long the logs are followed, too. Watching is called when that begins.
	During   time.Duration
	Watching func()
}

// Advise decides by the requests of the operator.
func (a Adviser) Advise(ctx context.Context) (advise.Advice, error) {
	s, err := a.Reader.ReadAll(ctx, snapshot.Programs, snapshot.Configs(a.Namespace), snapshot.Members(a.Namespace), snapshot.Target(a.Namespace, a.Workload), snapshot.Usage(a.Namespace, a.Workload))
	if err == nil {
		err = a.onTheMesh(s.Subjects.Workload)
	}
	if err != nil {
		return advise.Advice{}, err
	}
	profile, err := a.profile(ctx, s)
	if err != nil {
		return advise.Advice{}, err
	}
	lists, _, err := a.Reader.Served()
	if err != nil {
		return advise.Advice{}, err
	}
	in := advise.Input{Profile: profile, Namespace: a.Namespace, Workload: a.Workload.Argument(), Served: resources.ServedBy(lists, nil)}
	if root := (adoption.Request{Namespace: a.Namespace, Target: a.Workload}).Root(s); root != nil {
		in.Root = root.Name
	}
	return advise.Evaluate(in), nil
}

// onTheMesh returns an error if the workload has no pods on the mesh.
func (a Adviser) onTheMesh(w *snapshot.Workload) error {
	name := a.Workload.Argument()
	switch {
	case w == nil:
		return fmt.Errorf("there is no %s in namespace %s: name another namespace by -n", name, a.Namespace)
	case len(w.Pods) == 0:
		return fmt.Errorf("%s has no pods: scale it up", name)
	case w.Template[v1alpha1.EnableProxyLabel] != "true":
		return fmt.Errorf("the pods of %s are not on the mesh: label its pod template by kubectl -n %s patch %s --type=merge -p '%s'; without a ShardingConfig their requests pass unchanged",
			name, a.Namespace, name, adoption.LabelPatch(true))
	}
	return nil
}

// profile returns what the pods did, by the record of the manager, or by the logs of agents.
func (a Adviser) profile(ctx context.Context, s *snapshot.Snapshot) (*advise.Profile, error) {
	logs := a.Since > 0 || a.During > 0
	if recorded := s.Subjects.Usage; recorded != nil && !logs {
		out := &advise.Profile{}
		out.Record(recorded)
		return out, nil
	}
	agents, err := a.agents(s)
	if err != nil && !logs {
		return nil, fmt.Errorf("nothing is recorded of %s yet: wait for two minutes while it works without a ShardingConfig, delete its pods if they are older than the mesh, or log its requests: %w", a.Workload.Argument(), err)
	}
	if err != nil {
		return nil, err
	}
	return a.logged(ctx, s.Subjects.Workload.Pods, agents)
}

// agents returns the agents that serve the pods of the workload, by name. It returns an error if one logs no
// access lines.
func (a Adviser) agents(s *snapshot.Snapshot) (map[string]*corev1.Pod, error) {
	out := map[string]*corev1.Pod{}
	for i := range s.Subjects.Workload.Pods {
		agent, err := tap.Agent(s, a.Namespace, s.Subjects.Workload.Pods[i].Name)
		if err != nil {
			return nil, err
		}
		out[agent.Name] = agent
	}
	return out, nil
}

// logged reads what pods did from the logs of agents.
func (a Adviser) logged(ctx context.Context, pods []corev1.Pod, agents map[string]*corev1.Pod) (*advise.Profile, error) {
	options := &corev1.PodLogOptions{SinceSeconds: new(int64(max(1, cmp.Or(a.Since, recently).Seconds()))), Follow: a.During > 0}
	reading := ctx
	if options.Follow {
		var cancel context.CancelFunc
		reading, cancel = context.WithTimeout(ctx, a.During)
		defer cancel()
		a.Watching()
	}
	of := map[string]bool{}
	for i := range pods {
		of[pods[i].Namespace+"/"+pods[i].Name] = true
	}
	var mu sync.Mutex
	out := &advise.Profile{}
	add := func(text []byte) error {
		if line, ok := tap.Parse(text); ok && of[line.Pod] {
			mu.Lock()
			defer mu.Unlock()
			out.Add(line)
		}
		return nil
	}
	var all errgroup.Group
	for _, agent := range agents {
		all.Go(func() error {
			log, err := Log(reading, a.Reader, agent, options)
			if err != nil {
				return err
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
