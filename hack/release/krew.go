package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"text/template"
)

// manifest is what krew installs the plugin by.
var manifest = template.Must(template.New("").Parse(`apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: ctrlmesh
spec:
  version: {{.Version}}
  homepage: https://github.com/ctrlmesh/ctrlmesh
  shortDescription: Shard, limit and observe operators
  description: |
    Shows and explains what ctrlmesh, a controller mesh without sidecars, does with the
    operators of a cluster; divides operators into shards, and undoes that.
  platforms:
{{- range .Archives}}
  - selector:
      matchLabels: {os: {{.OS}}, arch: {{.Architecture}}}
    uri: https://github.com/ctrlmesh/ctrlmesh/releases/download/{{$.Version}}/{{.Name}}
    sha256: {{.Sum}}
    bin: {{.Program}}
{{- end}}
`))

type pluginArchive struct{ Name, OS, Architecture, Sum, Program string }

var archiveName = regexp.MustCompile(`_([a-z]+)_([a-z0-9]+)\.tar\.gz$`)

// krew writes the manifest of the plugin, by its archives.
func (r *release) krew(to io.Writer, archives []string) error {
	var described []pluginArchive
	for _, path := range archives {
		named := archiveName.FindStringSubmatch(path)
		if named == nil {
			return fmt.Errorf("%s does not end in _OS_ARCHITECTURE.tar.gz", path)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("reading an archive of the plugin: %w", err)
		}
		a := pluginArchive{Name: filepath.Base(path), OS: named[1], Architecture: named[2], Sum: fmt.Sprintf("%x", sha256.Sum256(b)), Program: "kubectl-ctrlmesh"}
		if a.OS == "windows" {
			a.Program += ".exe"
		}
		described = append(described, a)
	}
	return manifest.Execute(to, map[string]any{"Version": "v" + strings.TrimPrefix(r.tag, "v"), "Archives": described})
}
