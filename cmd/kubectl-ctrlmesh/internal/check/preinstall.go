package check

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

// Sections of the documentation about what the mesh needs.
const (
	docsKubernetes = "docs/operations.md#versions-of-kubernetes"
	docsInstall    = "README.md#install-it"
	docsCapture    = "docs/concepts.md#how-pods-are-captured"
)

// Versions of Kubernetes, as major and minor.
var (
	oldestKubernetes = [2]int{1, 30}
	firstTested      = [2]int{1, 34}
	lastTested       = [2]int{1, 37}
)

// ebpfKernel is the first version of Linux on which pods are captured by eBPF.
var ebpfKernel = [2]int{5, 14}

// privileged is the label by which a namespace admits the agents.
const privileged = "pod-security.kubernetes.io/enforce"

// PreParts returns what a check before the installation reads.
func PreParts(namespace string) []snapshot.Part {
	return []snapshot.Part{snapshot.OwnNamespace, snapshot.Definitions(definitionNames()), snapshot.Nodes, snapshot.Reviews(installing(namespace))}
}

// installing returns what the user who installs the mesh does.
func installing(namespace string) (out []snapshot.Access) {
	for _, r := range []struct{ group, resource, namespace string }{
		{"", "namespaces", ""},
		{"apiextensions.k8s.io", "customresourcedefinitions", ""},
		{"rbac.authorization.k8s.io", "clusterroles", ""},
		{"rbac.authorization.k8s.io", "clusterrolebindings", ""},
		{"admissionregistration.k8s.io", "mutatingwebhookconfigurations", ""},
		{"admissionregistration.k8s.io", "validatingwebhookconfigurations", ""},
		{"admissionregistration.k8s.io", "validatingadmissionpolicies", ""},
		{"admissionregistration.k8s.io", "validatingadmissionpolicybindings", ""},
		{"rbac.authorization.k8s.io", "roles", namespace},
		{"rbac.authorization.k8s.io", "rolebindings", namespace},
		{"rbac.authorization.k8s.io", "roles", "default"},
		{"rbac.authorization.k8s.io", "rolebindings", "default"},
		{"", "serviceaccounts", namespace},
		{"", "services", namespace},
		{"apps", "deployments", namespace},
		{"apps", "daemonsets", namespace},
		{"policy", "poddisruptionbudgets", namespace},
	} {
		out = append(out, snapshot.Access{Verb: "create", Group: r.group, Resource: r.resource, Namespace: r.namespace})
	}
	return out
}

// RunPre checks a cluster before the installation.
func RunPre(s *snapshot.Snapshot) Report {
	var f findings
	f.unread(s)
	f.kubernetes(s)
	f.access(s)
	f.leftovers(s)
	f.namespace(s)
	f.kernels(s)
	return f.report(fmt.Sprintf("Kubernetes %s, %d nodes", s.Kubernetes, len(s.Nodes)))
}

func (f *findings) kubernetes(s *snapshot.Snapshot) {
	version, ok := minor(s.Kubernetes)
	switch {
	case !ok:
		f.add(Unknown, "kubernetes-version", docsKubernetes, "see kubectl version", "the version of the apiserver, %q, cannot be parsed", s.Kubernetes)
	case slices.Compare(version[:], oldestKubernetes[:]) < 0:
		f.add(Error, "kubernetes-version", docsKubernetes, "upgrade Kubernetes", "Kubernetes %s is too old: the mesh needs 1.30 or later", s.Kubernetes)
	case slices.Compare(version[:], firstTested[:]) < 0 || slices.Compare(version[:], lastTested[:]) > 0:
		f.add(Warning, "kubernetes-version", docsKubernetes, "try the mesh in a cluster for tests first", "Kubernetes %s is not among the tested versions, 1.34 to 1.37", s.Kubernetes)
	}
}

func (f *findings) access(s *snapshot.Snapshot) {
	var lacking []string
	for _, a := range s.Access {
		if a.Allowed {
			continue
		}
		text := a.Resource
		if a.Group != "" {
			text += "." + a.Group
		}
		if a.Namespace != "" {
			text += " in namespace " + a.Namespace
		}
		lacking = append(lacking, text)
	}
	if len(lacking) > 0 {
		f.add(Error, "permission-missing", docsInstall, "install as a cluster administrator", "you may not create %s", strings.Join(lacking, ", "))
	}
}

// leftovers finds definitions of another version.
func (f *findings) leftovers(s *snapshot.Snapshot) {
	for _, file := range definitions(true) {
		if is, ok := s.Install.Definitions[definitionName(file)]; ok {
			f.definition(file, is)
		}
	}
}

func (f *findings) namespace(s *snapshot.Snapshot) {
	if s.Install.Namespace == nil {
		return
	}
	if level := s.Install.Namespace.Labels[privileged]; level != "" && level != "privileged" {
		f.add(Error, "namespace-restricted", docsHelm, fmt.Sprintf("kubectl label --overwrite namespace %s %s=privileged", s.Namespace, privileged),
			"namespace %s admits only pods of level %s, and agents are privileged", s.Namespace, level)
	}
}

func (f *findings) kernels(s *snapshot.Snapshot) {
	linux := 0
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if os := n.Status.NodeInfo.OperatingSystem; os != "" && os != "linux" {
			continue
		}
		linux++
		version, ok := minor(n.Status.NodeInfo.KernelVersion)
		switch {
		case !ok:
			f.add(Unknown, "kernel-version", docsCapture, "see uname -r on the node", "the kernel version of node %s, %q, cannot be parsed", n.Name, n.Status.NodeInfo.KernelVersion)
		case slices.Compare(version[:], ebpfKernel[:]) < 0:
			f.add(Warning, "kernel-version", docsCapture, "upgrade the kernel, or accept that pods there are captured by iptables", "node %s has Linux %s, and capture by eBPF needs 5.14", n.Name, n.Status.NodeInfo.KernelVersion)
		}
	}
	if linux == 0 && s.Has(snapshot.Nodes) {
		f.add(Error, "nodes-missing", docsInstall, "add nodes that run Linux", "the cluster has no Linux node")
	}
}
