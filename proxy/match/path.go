package match

import (
	"slices"
	"strings"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Path is a compiled PathMatch.
type Path struct {
	paths Patterns
	verbs set
}

// NewPath compiles a match.
func NewPath(m *meshv1.PathMatch) *Path {
	return &Path{m.GetPaths(), newSet(m.GetVerbs())}
}

// Match reports whether a non-resource request to the apiserver matches. verb is the
// method in lower case.
func (p *Path) Match(verb, path string) bool { return p.verbs.has(verb) && p.paths.Match(path) }

// Wildcards returns the number of conditions that match anything, as for Resource.
func (p *Path) Wildcards() int {
	return trues(p.verbs.all(), slices.ContainsFunc(p.paths, func(pattern string) bool { return strings.HasSuffix(pattern, "*") }))
}
