package meshv1

import (
	"slices"
	"strings"
)

// ClusterPathProblem returns what is wrong with one of [PodPolicy.ClusterPaths]; empty if nothing
// is.
func ClusterPathProblem(path string) string {
	segments := strings.Split(path, "/")
	switch {
	case len(segments) < 3 || segments[0] != "" || slices.Contains(segments[1:], ""):
		return "it must begin with /, have at least two segments, and none that is empty"
	case segments[1] == "*":
		return "a segment must come before the name of the cluster: every path would match"
	case slices.ContainsFunc(segments, func(s string) bool { return s == "." || s == ".." || strings.ContainsAny(s, "%?#") }):
		return "it must be a plain path, without dot segments, escapes and a query"
	}
	names := 0
	for _, s := range segments {
		if s == "*" {
			names++
		} else if strings.Contains(s, "*") {
			return "* must be a whole segment, for the name of the cluster"
		}
	}
	switch {
	case names != 1:
		return "one segment must be *, for the name of the cluster"
	case (segments[1] == "api" || segments[1] == "apis") && segments[len(segments)-1] == "*":
		return "a subresource must follow the name of the cluster, such as proxy: requests for the object itself lead to no cluster"
	}
	return ""
}
