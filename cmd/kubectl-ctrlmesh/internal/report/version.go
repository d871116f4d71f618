// Package report computes what the commands print from snapshots. It is pure. The fields of reports
// in JSON are an interface: they are only added.
package report

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Version is the versions of this program and of those in the cluster.
type Version struct {
	Client string `json:"client"`
	// Kubernetes is the version of the apiserver.
	Kubernetes string    `json:"kubernetes,omitempty"`
	Manager    []Running `json:"manager,omitempty"`
	Agents     []Running `json:"agents,omitempty"`
}

// Running is a version of a program that runs.
type Running struct {
	Version string `json:"version"`
	Image   string `json:"image"`
	Pods    int    `json:"pods"`
}

// VersionOf returns the versions in a snapshot; s may be nil.
func VersionOf(client string, s *snapshot.Snapshot) Version {
	out := Version{Client: client}
	if s != nil {
		out.Kubernetes = s.Kubernetes
		out.Manager, out.Agents = runningOf(s.Program(snapshot.Manager)), runningOf(s.Program(snapshot.Agent))
	}
	return out
}

// WriteText implements render.Report.
func (v Version) WriteText(t *render.Text) {
	rows := [][]string{{"client", v.Client, ""}}
	if v.Kubernetes != "" {
		rows = append(rows, []string{"kubernetes", v.Kubernetes, ""})
	}
	rows = append(rows, programRows("manager", v.Manager)...)
	rows = append(rows, programRows("agent", v.Agents)...)
	t.Table([]string{"PROGRAM", "VERSION", "PODS"}, rows)
}

func programRows(name string, running []Running) [][]string {
	return collect.Map(running, func(r Running) []string { return []string{name, r.Version, render.Number(r.Pods)} })
}

// runningOf counts pods by their image, sorted by version.
func runningOf(pods []*corev1.Pod) (out []Running) {
	for _, pod := range pods {
		image := imageOf(pod)
		i := slices.IndexFunc(out, func(r Running) bool { return r.Image == image })
		if i < 0 {
			i, out = len(out), append(out, Running{Version: VersionOfImage(image), Image: image})
		}
		out[i].Pods++
	}
	slices.SortFunc(out, func(a, b Running) int {
		return cmp.Or(strings.Compare(a.Version, b.Version), strings.Compare(a.Image, b.Image))
	})
	return out
}

// imageOf returns the image of a pod of the mesh, whose first container is its program.
func imageOf(pod *corev1.Pod) string {
	if len(pod.Spec.Containers) == 0 {
		return ""
	}
	return pod.Spec.Containers[0].Image
}

// VersionOfImage returns the tag of an image, or its digest if it has no tag.
func VersionOfImage(image string) string {
	name, digest, _ := strings.Cut(image, "@")
	last := name[strings.LastIndexByte(name, '/')+1:] // a registry may have a port
	if _, tag, ok := strings.Cut(last, ":"); ok {
		return tag
	}
	return cmp.Or(digest, "latest")
}

// Versions returns the versions of the pods of a program, sorted.
func Versions(s *snapshot.Snapshot, program string) (out []string) {
	for _, r := range runningOf(s.Program(program)) {
		if !slices.Contains(out, r.Version) {
			out = append(out, r.Version)
		}
	}
	return out
}
