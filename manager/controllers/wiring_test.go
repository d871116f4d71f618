package controllers

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"iter"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// wiring is how the parts of the manager are connected: the controllers, each a package below
// this one, and then the other packages that use the shared state. Names are fields of State
// and Signals. A field of State wakes those that wait for it when it is written, a signal when
// it is sent. "X if ..." wakes only then: the words are those of the comment on the function that
// [Value.When] gets.
var wiring = []wire{
	{"setting", "reads the administrator's settings, on each replica", "", "", "Settings", ""},
	{"address", "resolves where clients reach the apiserver beside its Service", "Settings if the apiserver's addresses have changed", "Settings", "Additional", ""},
	{"policy", "compiles one policy for each pod, and pushes them", "Additional, Locks, MeshCA, Objects, Resources, Roots, Settings if other policies follow from the settings, Shares", "Additional, LocksRead, Settings", "Allocator, Cluster, Compiled, Listed", ""},
	{"root", "runs `manager/roots`: which keys each shard owns", "Agents, Answers, Compiled if shards act by other specs, Entries, ForbiddenLocks, Listed, MissingBundles, Weights", "Compiled, ForbiddenLocks, Listed, Settings", "", ""},
	{"lock", "keeps the operators' locks", "Demands", "Compiled, Listed", "LocksRead", "Locks"},
	{"grant", "grants members access to the locks of their shards", "Compiled, Settings if grantAccess has changed", "Compiled, Settings", "ForbiddenLocks", ""},
	{"share", "divides the rules of scope Workload among pods", "Agents, Compiled, Recorded", "Compiled", "Allocator", "Shares, Unrecorded"},
	{"traffic", "writes the statuses of CircuitBreakers and FaultInjections", "Agents, Compiled, Counts, Unrecorded", "Compiled", "Allocator", "Recorded"},
	{"status", "writes the statuses of ShardingConfigs that are one shard", "Agents, Compiled, Locks, MissingBundles, Stamping", "Compiled, ForbiddenLocks, MissingBundles, Settings", "", ""},
	{"stamp", "has objects labelled, by admission and by a sweep", "Compiled if a configuration has changed, Listed if a namespace was created or deleted, Settings", "Compiled, Settings", "", ""},
	{"entry", "puts the pods of VirtualApps on the mesh", "Listed if a configuration has changed", "Listed", "Entries", ""},
	{"webhook", "pushes how agents route the reviews of admission", "Compiled", "Compiled", "", ""},
	{"bundle", "writes the CAs into the namespaces that need them", "Bundles, Compiled if pods need other bundles, EgressCA, MeshCA", "Compiled", "EgressBundle, MeshBundle, MissingBundles", "Bundles"},
	{"certificate", "renews and rotates the CAs and the manager's certificate", "Cluster if its version has changed, EgressBundle if the bundle has changed, MeshBundle if the bundle has changed", "Compiled, EgressBundle, MeshBundle", "", "EgressCA, MeshCA"},
	{"failover", "frees the locks of leaders that exited", "Agents", "Compiled", "", ""},
	{"node", "records what the nodes are able to do", "Agents", "", "", ""},
	{"usage", "records what operators request while their requests pass unchanged", "", "Compiled", "", ""},
	{"endpoint", "writes the leader's address", "", "", "", ""},

	{"manager", "watches objects, and reads the apiserver's addresses before it serves", "", "Settings", "Cluster", "Objects"},
	{"push", "receives acks and reports of agents", "", "", "", "Agents, Counts"},
	{"roots", "decides for each root, and writes what it decided", "", "Entries, MissingBundles", "", "Demands, Roots"},
	{"weigh", "counts the objects of namespaces", "", "", "", "Weights"},
	{"query", "evaluates the queries of analyses", "", "", "", "Answers"},
	{"label", "sweeps the labels of objects", "", "Settings", "", "Stamping"},
	{"resources", "discovers what the apiserver serves", "", "", "", "Resources"},
	{"validate", "validates at admission", "", "Settings", "", ""},
}

// wire is how one part is connected.
type wire struct {
	part, job string
	waits     string // what wakes it, and when if not at each change
	reads     string // beside what it writes
	writes    string
	sends     string
}

// severalWriters are the fields of State with more than one writer, and why that is safe.
var severalWriters = map[string]string{
	"Allocator": "its methods are atomic; State.Sharing orders those of policy and share",
	"Cluster":   "each replica stores it before it serves; afterwards the leader's policy controller does",
}

func TestTheWiringIsThatOfTheCode(t *testing.T) {
	code, _ := readWiring(t)
	table := map[string]wire{}
	for _, w := range wiring {
		w.job = ""
		table[w.part] = w
	}
	for _, w := range code {
		assert.Equal(t, w, table[w.part], "the code (expected) differs from the variable wiring (actual): correct the table, or the code if the part should not use that")
		delete(table, w.part)
	}
	assert.Empty(t, table, "parts in the variable wiring that use nothing: delete them there")
}

func TestEachPartOfTheStateHasItsWriterAndReaders(t *testing.T) {
	_, fields := readWiring(t)
	for _, field := range fields {
		var writers, readers []string
		for _, w := range wiring {
			named := func(list string) bool {
				return slices.ContainsFunc(strings.Split(list, ", "), func(one string) bool {
					name, _, _ := strings.Cut(one, " if ")
					return name == field
				})
			}
			if named(w.writes) || named(w.sends) {
				writers = append(writers, w.part)
			}
			// Several writers read what the others write.
			if named(w.reads) || named(w.waits) || severalWriters[field] != "" && named(w.writes) {
				readers = append(readers, w.part)
			}
		}
		assert.NotEmpty(t, readers, "nothing reads %s or waits for it: delete it", field)
		assert.NotEmpty(t, writers, "nothing writes or sends %s: delete it", field)
		if severalWriters[field] == "" {
			assert.Len(t, writers, 1, "%s has several writers: give it one, or say in severalWriters why that is safe", field)
		}
	}
}

func TestDesignShowsTheWiring(t *testing.T) {
	page, err := os.ReadFile("../../docs/design.md")
	require.NoError(t, err)
	var table strings.Builder
	table.WriteString("| part | job | is woken by | reads | writes | sends |\n|---|---|---|---|---|---|\n")
	for _, w := range wiring {
		fmt.Fprintf(&table, "| %s |\n", strings.Join([]string{"`" + w.part + "`", w.job, w.waits, w.reads, w.writes, w.sends}, " | "))
	}
	if !strings.Contains(string(page), table.String()) {
		t.Errorf("docs/design.md does not show the wiring: replace its table by\n%s", table.String())
	}
}

// managerPath is the import path of the packages whose wiring is read.
const managerPath = "github.com/ctrlmesh/ctrlmesh/manager"

// reader finds out how the code is wired. It type-checks the packages below managerPath from
// source. Those that they import from elsewhere are empty to it, which suffices to resolve
// the fields of State.
type reader struct {
	t        *testing.T
	set      *token.FileSet
	info     types.Info
	packages map[string]*types.Package
	files    map[string][]*ast.File
	// fields are those of State and Signals, by is the fields that a method of State reads.
	fields map[types.Object]bool
	by     map[types.Object][]string
	// uses are the names that a part uses, by part and kind of use.
	uses map[string]map[string][]string
	// docs are the comments on functions.
	docs map[types.Object]string
}

// readWiring returns the wiring of the code by part, without jobs, and the fields of State and
// Signals.
func readWiring(t *testing.T) (code []wire, fields []string) {
	r := &reader{
		t: t, set: token.NewFileSet(), packages: map[string]*types.Package{}, files: map[string][]*ast.File{},
		info:   types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}, Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}},
		fields: map[types.Object]bool{}, by: map[types.Object][]string{}, uses: map[string]map[string][]string{}, docs: map[types.Object]string{},
	}
	_, err := r.Import(managerPath)
	require.NoError(t, err)
	const own = managerPath + "/controllers"
	for _, name := range []string{"State", "Signals"} {
		for f := range r.packages[own].Scope().Lookup(name).Type().Underlying().(*types.Struct).Fields() {
			if f.Name() != "Changed" && f.Name() != "Sharing" { // which are the Signals, and a mutex
				r.fields[f] = true
				fields = append(fields, f.Name())
			}
		}
	}
	for pkg, files := range r.files {
		for f := range functions(files) {
			r.docs[r.info.Defs[f.Name]] = f.Doc.Text()
			if pkg == own {
				r.by[r.info.Defs[f.Name]] = r.named(f)
			}
		}
	}
	delete(r.files, own)
	for pkg, files := range r.files {
		if path.Dir(pkg) == own {
			r.note(path.Base(pkg), "")
		}
		for _, file := range files {
			r.walk(file, path.Base(pkg), pkg == managerPath)
		}
	}
	for _, part := range slices.Sorted(maps.Keys(r.uses)) {
		of := r.uses[part]
		of["reads"] = slices.DeleteFunc(of["reads"], func(name string) bool { return slices.Contains(of["writes"], name) })
		names := func(use string) string {
			return strings.Join(slices.Compact(slices.Sorted(slices.Values(of[use]))), ", ")
		}
		code = append(code, wire{part: part, waits: names("waits"), reads: names("reads"), writes: names("writes"), sends: names("sends")})
	}
	return code, fields
}

// functions iterates over the functions and methods of files.
func functions(files []*ast.File) iter.Seq[*ast.FuncDecl] {
	return func(yield func(*ast.FuncDecl) bool) {
		for _, file := range files {
			for _, d := range file.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && !yield(f) {
					return
				}
			}
		}
	}
}

// Import implements types.Importer.
func (r *reader) Import(of string) (*types.Package, error) {
	if p := r.packages[of]; p != nil {
		return p, nil
	}
	dir, ok := strings.CutPrefix(of, managerPath)
	if !ok {
		p := types.NewPackage(of, path.Base(of))
		p.MarkComplete()
		return p, nil
	}
	sources, err := filepath.Glob(filepath.Join("..", dir, "*.go"))
	for _, source := range sources {
		if strings.HasSuffix(source, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(r.set, source, nil, parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			return nil, err
		}
		r.files[of] = append(r.files[of], file)
	}
	c := types.Config{Importer: r, Error: func(error) {}} // of what empty packages lack
	r.packages[of], _ = c.Check(of, r.set, r.files[of], &r.info)
	return r.packages[of], err
}

// useOf is what the methods of the fields of State, and of signals, do with them.
var useOf = map[string]string{
	"Notify": "sends", "Load": "reads", "Store": "writes", "Swap": "writes",
	// Those of Allocator.
	"Share": "reads", "Lacks": "reads", "Record": "reads", "Unrecorded": "reads",
	"Open": "writes", "Close": "writes", "Round": "writes", "Recorded": "writes",
}

// walk notes what is used below a node. A part that package manager makes uses what is in its
// composite literal.
func (r *reader) walk(n ast.Node, part string, makesParts bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CompositeLit:
			if made, ok := r.info.Types[n].Type.(*types.Named); ok && makesParts && made.Obj().Pkg().Name() != part {
				for _, e := range n.Elts {
					r.walk(e, made.Obj().Pkg().Name(), true)
				}
				return false
			}
		case *ast.KeyValueExpr:
			if key, ok := n.Key.(*ast.Ident); ok && key.Name == "On" {
				r.note(part, "waits", r.sources(n.Value)...)
				return false
			}
		case *ast.SelectorExpr:
			if of, ok := n.X.(*ast.SelectorExpr); ok && r.fields[r.object(of)] {
				use := useOf[n.Sel.Name]
				assert.NotEmpty(r.t, use, "%s: add to useOf what %s does", r.set.Position(n.Pos()), n.Sel.Name)
				r.note(part, use, of.Sel.Name)
				return false
			}
			assert.False(r.t, r.fields[r.object(n)], "%s: use %s by one of its methods, so that the table can say how", r.set.Position(n.Pos()), n.Sel.Name)
			if by := r.by[r.object(n)]; by != nil {
				r.note(part, "reads", by...)
			}
		}
		return true
	})
}

// sources returns what wakes a controller that waits for the sources below a node.
func (r *reader) sources(n ast.Node) (names []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			for _, name := range r.named(call.Fun) {
				names = append(names, name+" if "+r.condition(call.Args[0]))
			}
			return false
		}
		if s, ok := n.(*ast.SelectorExpr); ok && r.fields[r.object(s)] {
			names = append(names, s.Sel.Name)
		}
		return true
	})
	return names
}

// condition returns what a function reports, by its comment.
func (r *reader) condition(n ast.Expr) string {
	name, _ := n.(*ast.Ident)
	if s, ok := n.(*ast.SelectorExpr); ok {
		name = s.Sel
	}
	require.NotNil(r.t, name, "%s: name the function that says which changes matter", r.set.Position(n.Pos()))
	doc := strings.ReplaceAll(r.docs[r.info.Uses[name]], "\n", " ")
	_, condition, ok := strings.Cut(doc, name.Name+" reports whether ")
	assert.True(r.t, ok, "%s: begin the comment on %s with %q", r.set.Position(n.Pos()), name.Name, name.Name+" reports whether")
	if end := strings.IndexAny(condition, ".,:;"); end >= 0 {
		condition = condition[:end]
	}
	return condition
}

// named returns the fields of State and Signals that are named below a node.
func (r *reader) named(n ast.Node) (names []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok && r.fields[r.object(s)] {
			names = append(names, s.Sel.Name)
		}
		return true
	})
	return names
}

// object returns the field or method that is selected, nil if it is of an empty package.
func (r *reader) object(s *ast.SelectorExpr) types.Object {
	if selected := r.info.Selections[s]; selected != nil {
		return selected.Obj()
	}
	return nil
}

// note adds a part, and names that it uses.
func (r *reader) note(part, use string, names ...string) {
	if r.uses[part] == nil {
		r.uses[part] = map[string][]string{}
	}
	r.uses[part][use] = append(r.uses[part][use], names...)
}
