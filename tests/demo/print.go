package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

func printTable(out io.Writer, rows []row) {
	t := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	_, _ = fmt.Fprintln(t, "ROOT\tSHARD\tOWNS\tPOD\tNODE\tCAPTURE\tLEADS\tRECONCILED\tOBJECTS")
	for _, r := range rows {
		cells := []string{r.root, r.shard, fmt.Sprintf("%d namespaces", r.owns), r.pod, r.node, r.capture, strings.Join(r.locks, ","), span(r.namespaces), strconv.Itoa(r.objects)}
		for i := range cells {
			cells[i] = cmp.Or(cells[i], "-")
		}
		_, _ = fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	_ = t.Flush()
}

// span abbreviates sorted names.
func span(names []string) string {
	switch len(names) {
	case 0:
		return "-"
	case 1:
		return names[0]
	}
	return fmt.Sprintf("%d (%s to %s)", len(names), names[0], names[len(names)-1])
}

// printLogs prints the end of the logs of the operator's pods.
func (d *demo) printLogs(ctx context.Context) {
	const enough = 10
	var pods corev1.PodList
	if err := d.List(ctx, &pods, client.InNamespace(operator), client.MatchingLabels{"app": workload}); err != nil {
		return
	}
	for _, pod := range pods.Items {
		logs, err := d.PodLogs(ctx, operator, pod.Name)
		if err != nil {
			d.say("%v", err)
		}
		lines := strings.Split(strings.TrimSpace(logs), "\n")
		fmt.Printf("  the end of the log of %s:\n    %s\n", pod.Name, strings.Join(lines[max(0, len(lines)-enough):], "\n    "))
	}
}

// printNext prints commands to try on the cluster, which stays up.
func (d *demo) printNext(ctx context.Context, w *world) {
	agent, port := "AGENT", "PORT"
	var pods corev1.PodList
	if err := d.List(ctx, &pods, client.InNamespace(kube.SystemNamespace)); err == nil {
		agent, port = metricsOf(pods.Items, agent, port)
	}
	object := "-n demo-00 tally t-00"
	if len(w.tallies) > 0 {
		object = fmt.Sprintf("-n %s tally %s", w.tallies[0].Namespace, w.tallies[0].Name)
	}
	fmt.Printf(`
The cluster stays up; make cluster-down stops it. Commands to try next:

  export KUBECONFIG=%s PATH=%s:$PATH
  # the mesh in a browser
  kubectl ctrlmesh ui
  # the shards, and who owns a namespace
  kubectl ctrlmesh -n %[3]s shards %[4]s; kubectl ctrlmesh -n %[3]s owner %[4]s demo-00
  # delete a leader: that shard gets a new one, the other keeps its own
  kubectl -n %[3]s delete pod %[4]s-0; kubectl -n %[3]s get leases -w
  # change an object: one pod reconciles it
  kubectl patch %[5]s --type merge -p '{"spec":{"say":"again"}}'; kubectl get %[5]s -o yaml
  # an agent's metrics, and the requests that it forwarded
  kubectl get --raw /api/v1/namespaces/%[6]s/pods/%[7]s:%[8]s/proxy/metrics
  kubectl -n %[6]s logs %[7]s

`, d.Kubeconfig, filepath.Join(d.Root, ".run", "bin")+":"+filepath.Join(d.Root, "bin"), operator, workload, object, kube.SystemNamespace, agent, port)
}

// metricsOf returns an agent and the port of its metrics.
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
