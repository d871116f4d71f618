package docs

import (
	"go/ast"
	"go/token"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The tables list exactly the reasons of conditions and Events.
func TestReasonsAreDocumented(t *testing.T) {
	conditions, events := reasons(t)
	const file = "../../docs/operations.md"
	first := func(rows [][]string) (out []string) {
		for _, row := range rows {
			require.Len(t, row, 4, "columns of the tables of reasons in docs/operations.md")
			require.NotEmpty(t, row[3], "say in docs/operations.md what to do about %s", row[0])
			out = append(out, row[0])
		}
		slices.Sort(out)
		return out
	}
	require.Equal(t, slices.Sorted(maps.Keys(conditions)), first(Section(t, file, "### Reasons of conditions")), "the table in docs/operations.md (actual) must list exactly the reasons of conditions in the code (expected)")
	require.Equal(t, slices.Sorted(maps.Keys(events)), first(Section(t, file, "### Events")), "the table in docs/operations.md (actual) must list exactly the reasons of Events in the code (expected)")
}

// reasons returns the reasons in the code. Those of conditions are the constants Reason... of
// the manager; those of Events are the constants of the proxy, and the arguments of the
// functions that record Events, and the fields of values of the type Event.
func reasons(t *testing.T) (conditions, events map[string]bool) {
	found := found{conditions: map[string]bool{}, events: map[string]bool{}, constants: map[string]string{}}
	for _, dir := range []string{"api", "manager", "agent", "proxy"} {
		inspect(t, dir, func(n ast.Node) {
			switch n := n.(type) {
			case *ast.ValueSpec:
				found.constant(n, dir)
			case *ast.CallExpr:
				found.call(n, dir)
			case *ast.CompositeLit:
				found.literal(n)
			}
		})
	}
	for _, argument := range found.arguments {
		found.event(argument)
	}
	return found.conditions, found.events
}

// found is what the files read so far contain.
type found struct {
	conditions, events map[string]bool
	constants          map[string]string // reasons by the name of their constant
	arguments          []ast.Expr        // reasons as given to functions that record Events
}

// reasonArgument is the index of the reason among the arguments of functions that record Events.
var reasonArgument = map[string]int{"Eventf": 3, "Pod": 1, "Node": 0, "recordLoss": 0}

// constant adds the constants Reason... of a declaration.
func (f *found) constant(n *ast.ValueSpec, dir string) {
	for i, name := range n.Names {
		value, ok := literal(n.Values, i)
		if !ok {
			continue
		}
		f.constants[name.Name] = value
		if !strings.HasPrefix(name.Name, "Reason") {
			continue
		}
		if dir == "proxy" {
			f.events[value] = true
		} else {
			f.conditions[value] = true
		}
	}
}

// call adds the reason that a call records an Event with, if it records one.
func (f *found) call(n *ast.CallExpr, dir string) {
	callee, ok := n.Fun.(*ast.SelectorExpr)
	if !ok || dir != "manager" && dir != "agent" {
		return
	}
	if i, records := reasonArgument[callee.Sel.Name]; records && i < len(n.Args) {
		f.arguments = append(f.arguments, n.Args[i])
	}
}

// literal adds the reasons of values of the type Event, which has a type before its reason.
func (f *found) literal(n *ast.CompositeLit) {
	of := n.Type
	list, isList := of.(*ast.ArrayType)
	if isList {
		of = list.Elt
	}
	if name, ok := of.(*ast.Ident); !ok || name.Name != "Event" {
		return
	}
	if !isList && len(n.Elts) == 4 {
		f.arguments = append(f.arguments, n.Elts[1])
	}
	for _, e := range n.Elts {
		if e, ok := e.(*ast.CompositeLit); isList && ok && e.Type == nil && len(e.Elts) == 4 {
			f.arguments = append(f.arguments, e.Elts[1])
		}
	}
}

// event adds the reason that an argument is: a literal or a constant, converted or not.
func (f *found) event(argument ast.Expr) {
	if value, ok := literal([]ast.Expr{argument}, 0); ok {
		f.events[value] = true
	}
	if conversion, ok := argument.(*ast.CallExpr); ok && len(conversion.Args) == 1 {
		argument = conversion.Args[0]
	}
	name := ""
	switch e := argument.(type) {
	case *ast.SelectorExpr:
		name = e.Sel.Name
	case *ast.Ident:
		name = e.Name
	}
	if reason := f.constants[name]; reason != "" {
		f.events[reason] = true
	}
}

// literal returns the value of a string literal.
func literal(values []ast.Expr, i int) (string, bool) {
	if i >= len(values) {
		return "", false
	}
	l, ok := values[i].(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}
