package command

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

func TestLint(t *testing.T) {
	const good = `apiVersion: ctrlmesh.kusionstack.io/v1alpha1
kind: ShardingConfig
metadata: {name: shard-0}
spec:
  selector: {matchLabels: {shard: "0"}}
  controller: {leaderElectionName: lock}
  limits:
  - relateResources: [{apiGroups: [apps], resources: [deployments]}]
    selector: {matchLabels: {part: a}}
`
	for _, c := range []struct {
		name, in string
		code     int
	}{
		{"lint-valid", good, Healthy},
		{"lint-faults", "# nothing\n---\n" + strings.Replace(good, "limits", "limit", 1) + "---\n" + strings.Replace(good, "part: a", "part: a b", 1) + "---\n" + good + "---\n" + strings.Replace(good, "shard-0", "shard-1", 1) + "---\na: b: c\n", Found},
		{"lint-warning", good + "  failurePolicy: Open\n", Healthy},
	} {
		for _, format := range []string{"table", "json", "yaml"} {
			t.Run(c.name+"/"+format, func(t *testing.T) {
				r := run(t, meshtest.Healthy(t), c.in, "lint", "-f", "-", "-o", format)
				assert.Equal(t, c.code, r.code)
				requireGolden(t, c.name+"."+format, r)
			})
		}
	}
}

func TestLintTakesTheExamples(t *testing.T) {
	files, err := filepath.Glob("../../../../deploy/examples/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		r := run(t, meshtest.Healthy(t), "", "lint", "-f", file)
		require.Equal(t, Healthy, r.code, "%s:\n%s", file, r)
	}
}

// manifest is a code block of a page with a manifest that can be applied.
var manifest = regexp.MustCompile("(?s)```yaml\n(apiVersion: [^`]*?\nmetadata:[^`]*?)```")

func TestLintTakesTheManifestsOfThePages(t *testing.T) {
	pages, err := filepath.Glob("../../../../docs/*.md")
	require.NoError(t, err)
	linted := 0
	for _, page := range append(pages, "../../../../README.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range manifest.FindAllStringSubmatch(string(text), -1) {
			r := run(t, meshtest.Healthy(t), m[1], "lint", "-f", "-")
			require.Equal(t, Healthy, r.code, "%s:\n%s\n%s", page, m[1], r)
			linted++
		}
	}
	require.NotZero(t, linted)
}

func TestLintWithoutFilesIsUnknown(t *testing.T) {
	for _, args := range []string{"lint", "lint -f /does/not/exist", "lint a.yaml"} {
		r := run(t, meshtest.Healthy(t), "", strings.Fields(args)...)
		require.Equal(t, Unknown, r.code, args)
		require.Contains(t, r.err, "error: ", args)
	}
}
