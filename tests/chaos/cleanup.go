package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// cleanup removes the mesh by the commands of the README, while there are still
// members and a root, and looks for what is left of it: on the nodes, in the networks of the
// members' pods, and in the cluster.
func cleanup(ctx context.Context, w *world, r *result) error {
	members, err := w.fleet(ctx, r)
	if err != nil {
		return err
	}
	inventories := map[string]string{}
	for _, node := range w.nodes {
		if inventories[node], err = w.onNode(ctx, node, "inventory", pinDir); err != nil {
			return err
		}
	}
	// What is looked for must have been there to be seen.
	for _, m := range members {
		if m.way == "address" {
			continue
		}
		there, err := w.inPod(ctx, m)
		if err != nil {
			return err
		}
		if len(there) == 0 {
			return fmt.Errorf("%s is captured, and nothing of it is in its network", m.Name)
		}
	}
	if err := w.keptRoot(ctx, members[0].Namespace); err != nil {
		return err
	}
	uninstall := exec.CommandContext(ctx, filepath.Join(w.Root, "hack", "uninstall.sh"))
	if out, err := uninstall.CombinedOutput(); err != nil {
		return fmt.Errorf("hack/uninstall.sh: %w: %s", err, out)
	}
	w.say("  uninstalled")

	var left []string
	err = w.until(ctx, "nothing to be left", func(ctx context.Context) error {
		left = nil
		for _, node := range w.nodes {
			found, err := w.onNode(ctx, node, "left", w.cgroupRoot(ctx, node), inventories[node])
			if err != nil {
				return err
			}
			left = append(left, prefixed(node, found)...)
			if found, err = w.NodeExec(ctx, node, "bash", "-c", traces); err != nil {
				return err
			}
			left = append(left, prefixed(node, found)...)
		}
		for _, m := range members {
			found, err := w.inPod(ctx, m)
			if err != nil {
				return err
			}
			left = append(left, found...)
		}
		found, err := w.Kubectl(ctx, "get", "-A", "-o", "name", "-l", "app.kubernetes.io/part-of=ctrlmesh",
			"namespaces,clusterroles,clusterrolebindings,roles,rolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,services,configmaps,secrets,daemonsets,deployments,pods,leases")
		if err != nil {
			return err
		}
		left = append(left, prefixed("cluster", found)...)
		if found, err = w.Kubectl(ctx, "get", "-A", "-o", "name", "-l", "ctrlmesh.kusionstack.io/bundle=true", "configmaps"); err != nil {
			return err
		}
		left = append(left, prefixed("cluster", found)...)
		if found, err = w.Kubectl(ctx, "get", "customresourcedefinitions", "-o", "name"); err != nil {
			return err
		}
		for _, crd := range prefixed("cluster", found) {
			if strings.HasSuffix(crd, "."+meshv1alpha1.GroupName) {
				left = append(left, crd)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("%d things are: %s, for one", len(left), left[0])
		}
		return nil
	})
	r.left, r.looked = left, err == nil || len(left) > 0
	if len(left) > 0 {
		return nil // it is counted
	}
	return err
}

// keptRoot makes a root, and waits until it cannot be deleted without the manager.
func (w *world) keptRoot(ctx context.Context, home string) error {
	root := &meshv1alpha1.ShardingConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "kept"},
		Spec: meshv1alpha1.ShardingConfigSpec{Root: &meshv1alpha1.RootConfig{
			Prefix: "kept", TargetStatefulSet: "kept",
			Auto:             &meshv1alpha1.AutoConfig{ShardingSize: 2, EveryShardReplicas: 1, Rebalance: meshv1alpha1.RebalanceOff},
			ResourceSelector: []meshv1alpha1.ObjectLimiter{{RelateResources: []meshv1alpha1.ResourceGroup{{APIGroups: []string{""}, Resources: []string{"secrets"}}}}},
		}},
	}
	if err := w.create(ctx, root); err != nil {
		return err
	}
	return w.until(ctx, "the root to be the manager's", func(ctx context.Context) error {
		if err := w.Get(ctx, client.ObjectKeyFromObject(root), root); err != nil {
			return err
		}
		if !controllerutil.ContainsFinalizer(root, meshv1alpha1.HandoverFinalizer) {
			return errors.New("it has no finalizer")
		}
		return nil
	})
}

// traces prints what is of the mesh on a node's file systems and in its tables. The
// directories that hostPath volumes were mounted from are the kubelet's, if empty.
const traces = `
find /sys/fs/bpf -mindepth 1 ! -name '*.debug' -printf 'pin %p\n'
for dir in /var/lib/ctrlmesh /run/ctrlmesh; do [ ! -d $dir ] || find $dir -mindepth 1 -printf 'file %p\n'; done
find /run/nri /var/run/nri /opt/nri -path '*ctrlmesh*' -printf 'file %p\n' 2>/dev/null
awk '$5 ~ /ctrlmesh/ {print "mount", $5}' /proc/self/mountinfo
grep ctrlmesh /proc/net/unix | sed 's/^/socket /'
for p in $(pidof ctrlmesh-agent ctrlmesh-manager); do echo "process $p"; done
for t in iptables-save ip6tables-save iptables-legacy-save ip6tables-legacy-save 'nft list ruleset'; do $t 2>/dev/null | grep -i ctrlmesh | sed 's/^/rule /'; done
exit 0`

// inPod is what of the mesh is in a member's network: chains, and sockets that are
// of no process of the pod.
func (w *world) inPod(ctx context.Context, m *member) ([]string, error) {
	rules, err := w.inNetns(ctx, m.Pod, "bash", "-c",
		`for t in iptables-save ip6tables-save iptables-legacy-save ip6tables-legacy-save 'nft list ruleset'; do $t 2>/dev/null | grep -i ctrlmesh | sed 's/^/rule /'; done; exit 0`)
	if err != nil {
		return nil, err
	}
	sockets, err := w.onNode(ctx, m.Spec.NodeName, "foreign", string(m.UID))
	if err != nil {
		return nil, err
	}
	return append(prefixed(m.Name, rules), prefixed(m.Name, sockets)...), nil
}

// prefixed are the lines of a text, each with where it is from.
func prefixed(where, text string) (out []string) {
	for line := range strings.Lines(text) {
		out = append(out, where+": "+strings.TrimSpace(line))
	}
	return out
}

// cgroupRoot is the root of a node's unified hierarchy.
func (w *world) cgroupRoot(ctx context.Context, node string) string {
	const unified = "/sys/fs/cgroup/unified"
	if _, err := w.NodeExec(ctx, node, "test", "-d", unified); err == nil {
		return unified
	}
	return "/sys/fs/cgroup"
}
