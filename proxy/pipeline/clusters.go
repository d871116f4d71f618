package pipeline

import (
	"fmt"
	"strings"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// ClusterPaths are the paths at which the apiserver passes requests on to member clusters.
type ClusterPaths []clusterPath

// clusterPath is such a path, before and after the name of the cluster.
type clusterPath struct{ before, after string }

// NewClusterPaths parses paths in which one segment is "*", for the name of the cluster.
func NewClusterPaths(patterns []string) (out ClusterPaths, err error) {
	for _, p := range patterns {
		if problem := meshv1.ClusterPathProblem(p); problem != "" {
			return nil, fmt.Errorf("path of clusters %q: %s", p, problem)
		}
		before, after, _ := strings.Cut(p, "*")
		out = append(out, clusterPath{before, after})
	}
	return out, nil
}

// cut returns the name of the cluster that a decoded path leads to, and the path there. The name
// is empty if the path leads to none. If that cluster has members itself, the path is that in the
// last of them.
func (c ClusterPaths) cut(path string) (cluster, inner string) {
	cluster, inner = c.next(path)
	for deeper := cluster; deeper != ""; {
		deeper, inner = c.next(inner)
	}
	return cluster, inner
}

func (c ClusterPaths) next(path string) (cluster, inner string) {
	for _, p := range c {
		rest, ok := strings.CutPrefix(path, p.before)
		if !ok {
			continue
		}
		end := strings.IndexByte(rest, '/')
		if end < 0 {
			end = len(rest)
		}
		inner, ok = strings.CutPrefix(rest[end:], p.after)
		switch {
		case !ok || end == 0:
		case inner == "":
			return rest[:end], "/"
		case inner[0] == '/':
			return rest[:end], inner
		}
	}
	return "", path
}
