package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

func printTable(out io.Writer, rows []row) {
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(t, "SHARD\tPOD\tNODE\tCAPTURE\tLOCK\tNAMESPACES\tOBJECTS")
	for _, r := range rows {
		cells := []string{r.shard, r.pod, r.node, r.capture, strings.Join(r.locks, ","), span(r.namespaces), strconv.Itoa(r.objects)}
		for i := range cells {
			cells[i] = cmp.Or(cells[i], "-")
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	_ = t.Flush()
}

// span tells of sorted names in little room.
func span(names []string) string {
	switch len(names) {
	case 0:
		return "-"
	case 1:
		return names[0]
	}
	return fmt.Sprintf("%d (%s to %s)", len(names), names[0], names[len(names)-1])
}

// printNext says what to try on the cluster, which stays up.
func (d *demo) printNext(ctx context.Context) {
	agent, port := "AGENT", "PORT"
	var pods corev1.PodList
	if err := d.List(ctx, &pods, client.InNamespace(kube.SystemNamespace)); err == nil {
		agent, port = metricsOf(pods.Items, agent, port)
	}
	fmt.Printf(`
The cluster stays up; make cluster-down ends it. What to try next:

  export KUBECONFIG=%s
  kubectl -n %[2]s get shardingconfigs                      the shards; -o yaml for each member's state
  kubectl -n %[2]s delete pod %[3]s-0                          only that shard's lock is let go and taken again:
  kubectl -n %[2]s get leases -w
  kubectl -n demo-00 patch tally t-00 --type merge -p '{"spec":{"say":"again"}}'
  kubectl -n demo-00 get tally t-00 -o yaml                       one pod answered
  kubectl get --raw /api/v1/namespaces/%[4]s/pods/%[5]s:%[6]s/proxy/metrics
  kubectl -n %[4]s logs %[5]s

`, d.Kubeconfig, operator, workload, kube.SystemNamespace, agent, port)
}

// metricsOf finds an agent and the port of its metrics.
func metricsOf(pods []corev1.Pod, agent, port string) (string, string) {
	for _, pod := range pods {
		if !strings.HasPrefix(pod.Name, kube.AgentName+"-") {
			continue
		}
		for _, c := range pod.Spec.Containers {
			for _, p := range c.Ports {
				if strings.Contains(p.Name, "metrics") {
					return pod.Name, strconv.Itoa(int(p.ContainerPort))
				}
			}
		}
		agent = pod.Name
	}
	return agent, port
}
