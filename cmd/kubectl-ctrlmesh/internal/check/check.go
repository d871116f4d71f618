// Package check finds what is wrong with the mesh, its installation and the operators on it, in a
// snapshot. It is pure.
package check

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/compile"
)

// Severity is how bad a finding is.
type Severity string

// Severities.
const (
	// Error: something does not work.
	Error Severity = "error"
	// Warning: something may stop working, or does not do what its author may expect.
	Warning Severity = "warning"
	// Unknown: something could not be checked.
	Unknown Severity = "unknown"
)

// Finding is one thing that is wrong.
type Finding struct {
	Severity Severity `json:"severity"`
	// ID names the kind of finding. It is stable.
	ID string `json:"id"`
	// Found is what was found, and Do what to do about it.
	Found string `json:"found"`
	Do    string `json:"do"`
	// Docs is the section of the documentation, as a path in the repository with an anchor.
	Docs string `json:"docs"`
}

// Report is the result of a check.
type Report struct {
	Healthy  bool      `json:"healthy"`
	Findings []Finding `json:"findings"`
	// Summary is the result in one line.
	Summary string `json:"summary"`
}

// findings collects what is found.
type findings []Finding

func (f *findings) add(severity Severity, id, docs, do, format string, args ...any) {
	*f = append(*f, Finding{Severity: severity, ID: id, Found: fmt.Sprintf(format, args...), Do: do, Docs: docs})
}

// Parts returns what a check reads, in the order in which it must be read.
func Parts() []snapshot.Part {
	return []snapshot.Part{
		snapshot.Programs, snapshot.Limits, snapshot.Definitions(definitionNames()), snapshot.Admission(mutatingNames, validatingNames, policyNames),
		snapshot.Keys, snapshot.Certificates, snapshot.Configs(""), snapshot.Members(""), snapshot.Locks, snapshot.Others,
	}
}

// Run checks a mesh that is installed.
func Run(s *snapshot.Snapshot) Report {
	var f findings
	f.unread(s)
	if s.Has(snapshot.Programs) && s.Mesh.Manager == nil && s.Mesh.Agents == nil {
		f.add(Error, "mesh-missing", "README.md#install-it", "install the mesh, or name its namespace by --mesh-namespace",
			"neither Deployment %s nor DaemonSet %s exists in namespace %s", snapshot.Manager, snapshot.Agent, s.Namespace)
		return f.report("")
	}
	f.programs(s)
	f.versions(s)
	f.quotas(s)
	f.settings(s)
	f.definitions(s)
	f.webhooks(s)
	f.policies(s)
	f.authorities(s)
	f.operators(s)
	f.pods(s)
	return f.report(summary(s))
}

// unread adds what could not be read.
func (f *findings) unread(s *snapshot.Snapshot) {
	for _, u := range s.Unread {
		f.add(Unknown, "unread", "docs/commands.md#check", "ask for the permission to read it, or check the connection to the apiserver", "%s cannot be read: %v", u.What, u.Err)
	}
}

func summary(s *snapshot.Snapshot) string {
	operators := collect.Count(s.Configs, func(c v1alpha1.ShardingConfig) bool { return !compile.Derived(&c) })
	return fmt.Sprintf("manager %s, %s, %s, %s", strings.Join(report.Versions(s, snapshot.Manager), ", "),
		render.Count(len(s.Program(snapshot.Agent)), "agent"), render.Count(operators, "ShardingConfig"), render.Count(len(s.Pods), "labelled pod"))
}

// report sorts the findings: errors first.
func (f findings) report(of string) Report {
	rank := map[Severity]int{Error: 0, Warning: 1, Unknown: 2}
	out := Report{Findings: append([]Finding{}, f...)}
	slices.SortStableFunc(out.Findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(rank[a.Severity], rank[b.Severity]), strings.Compare(a.ID, b.ID), strings.Compare(a.Found, b.Found))
	})
	out.Healthy = len(f) == 0
	out.Summary = "no problems found: " + of
	if !out.Healthy {
		out.Summary = fmt.Sprintf("errors: %d, warnings: %d, unknown: %d", out.Count(Error), out.Count(Warning), out.Count(Unknown))
	}
	return out
}

// Count returns the number of findings of a severity.
func (r Report) Count(severity Severity) int {
	return collect.Count(r.Findings, func(f Finding) bool { return f.Severity == severity })
}

// WriteText implements render.Report.
func (r Report) WriteText(t *render.Text) {
	for _, f := range r.Findings {
		t.Line("%-7s  %s: %s", f.Severity, f.ID, f.Found)
		t.Line("         %s", f.Do)
		t.Line("         %s", f.Docs)
	}
	t.Line("%s", r.Summary)
}
