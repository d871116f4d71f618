package capture

import (
	"context"
	"strings"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/inject"
	"github.com/ctrlmesh/ctrlmesh/manager/usage"
	"github.com/ctrlmesh/ctrlmesh/tests/chaos/capture/fleet"
)

// leftOnNodes returns the remnants on the nodes: BPF objects of the inventories, files,
// mounts, sockets, processes and firewall rules.
func (s *suite) leftOnNodes(ctx context.Context, inventories map[string]string) (left []string, err error) {
	for _, node := range s.Nodes {
		found, err := s.onNode(ctx, node, "left", s.cgroupRoot(ctx, node), inventories[node])
		if err != nil {
			return left, err
		}
		left = append(left, prefixed(node, found)...)
		if found, err = s.NodeExec(ctx, node, "bash", "-c", traces); err != nil {
			return left, err
		}
		left = append(left, prefixed(node, found)...)
	}
	return left, nil
}

// leftInPods returns the remnants in the members' network namespaces.
func (s *suite) leftInPods(ctx context.Context, _ map[string]string) (left []string, err error) {
	for _, m := range s.fleet.Members {
		found, err := s.inPod(ctx, m)
		if err != nil {
			return left, err
		}
		left = append(left, found...)
	}
	return left, nil
}

// leftInCluster returns the remaining API objects of the mesh.
func (s *suite) leftInCluster(ctx context.Context, _ map[string]string) (left []string, err error) {
	found, err := s.Kubectl(ctx, "get", "-A", "-o", "name", "-l", "app.kubernetes.io/part-of=ctrlmesh",
		"namespaces,clusterroles,clusterrolebindings,roles,rolebindings,mutatingwebhookconfigurations,validatingwebhookconfigurations,services,configmaps,secrets,daemonsets,deployments,pods,leases")
	if err != nil {
		return nil, err
	}
	left = prefixed("cluster", found)
	for _, label := range []string{inject.BundleLabel, usage.Label} {
		if found, err = s.Kubectl(ctx, "get", "-A", "-o", "name", "-l", label+"=true", "configmaps"); err != nil {
			return left, err
		}
		left = append(left, prefixed("cluster", found)...)
	}
	if found, err = s.Kubectl(ctx, "get", "customresourcedefinitions", "-o", "name"); err != nil {
		return left, err
	}
	for _, crd := range prefixed("cluster", found) {
		if strings.HasSuffix(crd, "."+meshv1alpha1.GroupName) {
			left = append(left, crd)
		}
	}
	return left, nil
}

// findRules prints the firewall rules of the mesh in a network namespace.
const findRules = `for t in iptables-save ip6tables-save iptables-legacy-save ip6tables-legacy-save 'nft list ruleset'; do $t 2>/dev/null | grep -i ctrlmesh | sed 's/^/rule /'; done; exit 0`

// traces prints what is of the mesh in a node's file systems and tables. It accepts the empty
// directories that hostPath volumes were mounted from, which are the kubelet's.
const traces = `
find /sys/fs/bpf -mindepth 1 ! -name '*.debug' -printf 'pin %p\n'
for dir in /var/lib/ctrlmesh /run/ctrlmesh; do [ ! -d $dir ] || find $dir -mindepth 1 -printf 'file %p\n'; done
find /run/nri /var/run/nri /opt/nri -path '*ctrlmesh*' -printf 'file %p\n' 2>/dev/null
awk '$5 ~ /ctrlmesh/ {print "mount", $5}' /proc/self/mountinfo
grep ctrlmesh /proc/net/unix | sed 's/^/socket /'
for p in $(pidof ctrlmesh-agent ctrlmesh-manager); do echo "process $p"; done
` + findRules

// inPod returns what is of the mesh in a member's network namespace: firewall rules, and
// sockets of no process of the pod.
func (s *suite) inPod(ctx context.Context, m *fleet.Member) ([]string, error) {
	rules, err := s.NetnsExec(ctx, m.Pod, "bash", "-c", findRules)
	if err != nil {
		return nil, err
	}
	sockets, err := s.onNode(ctx, m.Spec.NodeName, "foreign", string(m.UID))
	if err != nil {
		return nil, err
	}
	return append(prefixed(m.Name, rules), prefixed(m.Name, sockets)...), nil
}

// prefixed returns the lines of a text, each with its source.
func prefixed(where, text string) (out []string) {
	for line := range strings.Lines(text) {
		out = append(out, where+": "+strings.TrimSpace(line))
	}
	return out
}

// cgroupRoot returns the root of a node's unified cgroup hierarchy.
func (s *suite) cgroupRoot(ctx context.Context, node string) string {
	const unified = "/sys/fs/cgroup/unified"
	if _, err := s.NodeExec(ctx, node, "test", "-d", unified); err == nil {
		return unified
	}
	return "/sys/fs/cgroup"
}
