package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// size is how large the cluster is.
type size struct {
	nodes, pods, labelled, configs int
	// limited is how many labelled pods share limits of their workload.
	limited int
	// changes is how many changes of one configuration are measured.
	changes int
}

// Limits. The run fails above them.
const (
	changeWithin   = 2 * time.Second  // one configuration, p99
	failoverWithin = 30 * time.Second // all agents, after the leader was killed
)

// patience is how long a step may take before the run fails.
const patience = 5 * time.Minute

func main() {
	var s size
	flag.IntVar(&s.nodes, "nodes", 5000, "nodes, with an agent each")
	flag.IntVar(&s.pods, "pods", 50000, "pods")
	flag.IntVar(&s.labelled, "labelled", 20000, "pods on the mesh, of those")
	flag.IntVar(&s.configs, "configs", 500, "ShardingConfigs that divide the pods on the mesh equally, in a namespace each")
	flag.IntVar(&s.limited, "limited", 2000, "pods on the mesh that share limits")
	flag.IntVar(&s.changes, "changes", 100, "measured changes of one ShardingConfig")
	api := flag.String("api", "", "host:port of the apiserver")
	program := flag.String("manager", "", "the manager's program")
	kubeconfig := flag.String("manager-kubeconfig", "", "kubeconfig of the manager's service account")
	logs := flag.String("logs", "", "directory for the managers' logs")
	flag.Parse()
	kube.Main("scale", func(ctx context.Context) (bool, error) {
		cluster, err := kube.ConnectTo(*api)
		if err != nil {
			return false, err
		}
		r := &run{Cluster: cluster, size: s, program: *program, kubeconfig: *kubeconfig, logs: *logs, began: time.Now()}
		defer r.end()
		return r.all(ctx)
	})
}

// say prints what is under way.
func (r *run) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "[%5.0f s] %s\n", time.Since(r.began).Seconds(), fmt.Sprintf(format, args...))
}
