package repo

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/ctrlmesh/ctrlmesh/"

type pkg struct {
	ImportPath, Doc, Name string
	Deps, Imports         []string
	GoFiles               []string

	TestImports, XTestImports []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-tags=grpcnotrace", "-json=ImportPath,Doc,Name,Deps,Imports,GoFiles,TestImports,XTestImports", "./...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	require.NoError(t, err)
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else {
			require.NoError(t, err)
		}
		all = append(all, p)
	}
}

// TestImportsPointOneWay holds the rules of who may know whom.
func TestImportsPointOneWay(t *testing.T) {
	rules := []struct{ from, never string }{
		{"api/", "manager|agent|proxy|bpf|cmd|tests|internal"},
		{"bpf", "manager|agent|proxy|cmd"},
		{"proxy", "manager|agent|bpf|cmd"},
		{"manager", "agent|proxy|bpf|cmd"},
		{"agent", "manager|cmd"},
		{"internal", "manager|agent|proxy|bpf|cmd|tests"},
		{"tests/operators/(intruder|probe|reviewer|sloppy|tally)", "api|manager|agent|proxy|bpf|cmd"}, // the operators, not their trials
	}
	all := packages(t)
	for _, rule := range rules {
		never := regexp.MustCompile("^" + module + "(" + rule.never + ")(/|$)")
		from := regexp.MustCompile("^" + module + rule.from)
		seen := false
		for _, p := range all {
			if !from.MatchString(p.ImportPath) {
				continue
			}
			seen = true
			for _, dep := range p.Deps {
				assert.False(t, never.MatchString(dep), "%s must not depend on %s: move what both need to api or internal, or let the caller pass it", p.ImportPath, dep)
			}
		}
		assert.True(t, seen, "there is no package %s: correct the rule", rule.from)
	}
}

// TestAgentsAreSmall holds the agent to what it needs: its program takes memory on every node. A
// package that calls methods by names that the compiler does not see, as templates do, makes the
// linker keep all methods of all types, 23 MB of them.
func TestAgentsAreSmall(t *testing.T) {
	large := regexp.MustCompile(`^(html/template|net/http/pprof|k8s\.io/client-go/(kubernetes|informers|listers|applyconfigurations)(/.*)?|k8s\.io/(apiserver|component-base)/.*|github\.com/google/gnostic-models/.*)$`)
	for _, p := range packages(t) {
		if p.ImportPath != module+"cmd/ctrlmesh-agent" {
			continue
		}
		for _, dep := range p.Deps {
			assert.False(t, large.MatchString(dep), "ctrlmesh-agent must not depend on %s, which takes memory on every node: see agent/kube", dep)
		}
		return
	}
	t.Error("there is no ctrlmesh-agent: correct the test")
}

// TestPureCoresDoNoIO holds the packages that are tested with tables to it.
func TestPureCoresDoNoIO(t *testing.T) {
	impure := regexp.MustCompile(`^(net|net/http|os|os/exec|syscall|k8s\.io/client-go.*|sigs\.k8s\.io/controller-runtime.*|google\.golang\.org/grpc.*)$`)
	pure := map[string]bool{}
	for _, name := range []string{"manager/compile", "manager/compile/rules", "manager/dialect", "manager/handover", "manager/layout", "manager/quota", "manager/roots/decide", "manager/transfer", "internal/sharding", "proxy/match", "proxy/keep", "proxy/limit", "proxy/fault", "proxy/isolation", "proxy/filter", "proxy/lock", "proxy/query", "proxy/review/route", "agent/node/lifecycle", "tests/audit", "cmd/kubectl-ctrlmesh/internal/operator", "cmd/kubectl-ctrlmesh/internal/report", "cmd/kubectl-ctrlmesh/internal/check", "cmd/kubectl-ctrlmesh/internal/adoption", "cmd/kubectl-ctrlmesh/internal/tap", "cmd/kubectl-ctrlmesh/internal/explain"} {
		pure[module+name] = true
	}
	for _, p := range packages(t) {
		if !pure[p.ImportPath] {
			continue
		}
		delete(pure, p.ImportPath)
		for _, i := range p.Imports {
			assert.False(t, impure.MatchString(i), "%s does no I/O and must not import %s: let its caller pass the results as arguments", p.ImportPath, i)
		}
	}
	assert.Empty(t, pure, "there are no such packages: take them from the list, or correct their names")
}

// TestStagesKnowNoTransport holds the stages of a request to values of our own: of net/http
// they may use status codes and the names of methods.
func TestStagesKnowNoTransport(t *testing.T) {
	transport := []string{"downstream.go", "conn.go", "drain.go", "pod.go", "classify.go"}
	var files []string
	for _, dir := range []string{"proxy", "proxy/pipeline", "proxy/pipeline/stages"} {
		found, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, found, dir)
		files = append(files, found...)
	}
	uses := regexp.MustCompile(`[^.\w]http\.([A-Z]\w*)`)
	for _, file := range files {
		name := filepath.Base(file)
		if strings.HasSuffix(name, "_test.go") || slices.Contains(transport, name) {
			continue
		}
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, use := range uses.FindAllStringSubmatch(string(source), -1) {
			assert.Regexp(t, "^(Status|Method)", use[1], "%s must not use http.%s: add what it needs to proxy/pipeline, and convert it in proxy/downstream.go", name, use[1])
		}
	}
}

func TestEveryPackageIsDocumented(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) > 0 {
			assert.NotEmpty(t, p.Doc, "%s has no package comment: say above a package clause what it is for", p.ImportPath)
		}
	}
}

func TestGoModReplacesNothing(t *testing.T) {
	b, err := os.ReadFile("../../go.mod")
	require.NoError(t, err)
	assert.NotRegexp(t, `(?m)^replace`, string(b), "go.mod replaces a module, so that others cannot depend on this one: require a released version")
}

// TestNamedDependenciesAreUsed holds the dependencies that the project's users named.
func TestNamedDependenciesAreUsed(t *testing.T) {
	cmd := exec.Command("go", "list", "-m", "-f", "{{if not .Indirect}}{{.Path}}{{end}}", "all")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	require.NoError(t, err)
	direct := strings.Fields(string(out))
	const onlyByTests = "github.com/stretchr/testify"
	all := packages(t)
	for _, dependency := range []string{
		"github.com/cilium/ebpf",
		"github.com/coreos/go-iptables",
		"k8s.io/client-go",
		"github.com/vishvananda/netlink",
		"github.com/prometheus/client_golang",
		onlyByTests,
	} {
		assert.Contains(t, direct, dependency, "go.mod must require it directly: import it where it is used, and run go mod tidy")
		assert.True(t, slices.ContainsFunc(all, func(p pkg) bool {
			imports := p.Imports
			if dependency == onlyByTests {
				imports = slices.Concat(p.TestImports, p.XTestImports)
			} else if strings.HasPrefix(p.ImportPath, module+"tests/") {
				return false
			}
			return slices.ContainsFunc(imports, func(i string) bool { return strings.HasPrefix(i+"/", dependency+"/") })
		}), "no package imports %s: use it instead of what replaced it", dependency)
	}
}

func TestGoModIsTidy(t *testing.T) {
	cmd := exec.Command("go", "mod", "tidy", "-diff")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	require.NoError(t, err, "run go mod tidy:\n%s", out)
}
