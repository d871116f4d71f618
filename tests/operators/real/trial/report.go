package trial

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// Page returns the page of the documentation that shows the results.
func Page(results []*Result) string {
	var out strings.Builder
	out.WriteString(`# Operators that were tried

With this page you see which published operators run on the mesh, and what each of them needed.

Each of these operators is built from its published Go module, unmodified, and runs on a real cluster. It is installed by
the chart or the manifests that its module publishes, with its own RBAC and its own webhooks. Only the number of replicas and
the label of the mesh change. One more operator, python-client, is the project's own and uses the official Python client. Each runs without the mesh first. Then it is adopted by a rolling update while its objects change,
divided, rescaled, deprived of a leader, and removed again. The audit log shows who wrote what. The end state must equal
the one without the mesh.

` + "`make operators`" + ` runs the trials, and with ` + "`PAGE=docs/operators.md`" + ` it writes this page.

## Installation

| operator | version | manifests | what the installation needed | RBAC by hand | locks | lock access that the mesh granted | what had to be shared |
|---|---|---|---|---|---|---|---|
`)
	for _, r := range results {
		fmt.Fprintf(&out, "| %s | %s | %s | %s | %s | %s | %s | %s |\n", r.Operator, r.Version, cmp.Or(r.Source, "-"), cmp.Or(r.Needed, "-"),
			r.byHand(), r.Locks, r.granted(), cmp.Or(r.Shared, "-"))
	}
	out.WriteString(`
The images have the names that the manifests give them, so that no manifest changes. If an operator's Role names its lock,
the mesh permits it to use the locks of its shards, too. Two operators have no published manifests. The roles in those of the
trial do not count as RBAC by hand.

## Results

| operator | key | method | shards | writes | two owners | not reconciled | silent stops | adoption gap, p99 | differences | result |
|---|---|---|---|---|---|---|---|---|---|---|
`)
	for _, r := range results {
		fmt.Fprintf(&out, "| %s | %s | %s | %s | %d | %d | %d | %d | %v | %d | %s |\n",
			r.Operator, r.Key, cmp.Or(r.Method, "-"), sizes(r.Sizes), r.Writes, r.TwoOwners, r.Unreconciled,
			r.SilentStops, time.Duration(r.AdoptionGapP99)*time.Millisecond, r.Differences, r.outcome())
	}
	out.WriteString(`
The adoption gap is the time from a change of an object during adoption until the operator has observed it. It
contains the operator's own delay.
`)
	writeAdvice(&out, results)
	out.WriteString(`
## Not tried

These do not build from their published modules alone.

| operator | error | instead |
|---|---|---|
`)
	for _, e := range Exclusions() {
		fmt.Fprintf(&out, "| %s | %s | %s |\n", e.Name, e.Error, e.Instead)
	}
	return out.String()
}

// writeAdvice writes what the plugin said about each operator.
func writeAdvice(out *strings.Builder, results []*Result) {
	out.WriteString(`
## Advice

Before it is divided, each operator is on the mesh without a ShardingConfig for a moment, and
[` + "`kubectl ctrlmesh advise`" + `](commands.md#advise) judges by what it requests meanwhile. This is what it says, beside what the trial
then divides. It cannot name what an operator does not do in that moment.

| operator | verdict | resources to divide | divided, and not named | locks | risks |
|---|---|---|---|---|---|
`)
	for _, r := range results {
		if a := r.Advice; a != nil {
			fmt.Fprintf(out, "| %s | %s | %s | %s | %s | %d |\n", r.Operator, strings.TrimSuffix(a.Verdict+": "+a.Because, ": "),
				list(a.Divide), list(a.Missing), list(a.Locks), len(a.Risks))
		}
	}
}

// granted returns how many locks of shards the mesh permitted the operator to use.
func (r *Result) granted() string {
	if len(r.GrantedLocks) == 0 {
		return "none"
	}
	return fmt.Sprintf("%d locks of shards", len(r.GrantedLocks))
}

func list(of []string) string { return cmp.Or(strings.Join(of, ", "), "-") }

func (r *Result) outcome() string {
	switch {
	case r.OK():
		return "works"
	case r.Problem != "":
		return strings.ReplaceAll(strings.ReplaceAll(r.Problem, "\n", "; "), "|", "/")
	default:
		return "fails"
	}
}

func sizes(list []int32) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(list), " ", ", "), "[]")
}
