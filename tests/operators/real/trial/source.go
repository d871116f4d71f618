package trial

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/tools"
)

// Source names the manifests that an operator's module publishes. The zero value means that it
// publishes none, and that operator.yaml of the trial is used.
type Source struct {
	// Chart or Kustomization is a folder of the module that helm or kubectl renders.
	Chart, Kustomization string
	// Copied is the folder that is copied before, so that the operator's release steps can
	// change it; the rendered folder itself if it is empty.
	Copied string
	// Only are the names of the files that are copied; all if there are none.
	Only []string
	// Release does what the operator's own release does to its files before it publishes them.
	Release func(Release) error
	// Defaults is true if variables of the form ${NAME:=VALUE} get their values, which
	// clusterctl does when it installs.
	Defaults bool
}

// Release is the copy of manifests that the steps of a release change.
type Release struct {
	// Folder is the copy of Source.Copied, Module the operator's module.
	Folder, Module string
	// Version of the module, and the namespace of the installation.
	Version, Home string
}

// published reports whether the operator's module has manifests.
func (s Source) published() bool { return s.Chart+s.Kustomization != "" }

// String describes the source for the report.
func (s Source) String() string {
	switch {
	case s.Chart != "":
		return "chart `" + s.Chart + "`"
	case s.Kustomization != "":
		return "kustomization `" + path.Join(s.Kustomization, "kustomization.yaml") + "`"
	default:
		return "none is published"
	}
}

// render returns the manifests of the operator as its module publishes them.
func (b *Built) render(ctx context.Context) ([]byte, error) {
	if !b.Source.published() {
		return b.manifest("operator.yaml", "$(VERSION)", b.Version, "$(CONTROLLERS)", strings.Join(b.Controllers, ","))
	}
	folder, err := b.copied()
	if err != nil {
		return nil, fmt.Errorf("copying the manifests of %s: %w", b.Name, err)
	}
	if b.Source.Chart != "" {
		return b.template(ctx, folder)
	}
	text, err := run(ctx, filepath.Join(b.root, ".run", "bin", "kubectl"), "kustomize", folder)
	if b.Source.Defaults {
		text = withDefaults(text)
	}
	return text, err
}

// copied makes the copy that is rendered, by the steps of the operator's release.
func (b *Built) copied() (rendered string, err error) {
	published := b.Source.Chart + b.Source.Kustomization
	below := published
	if b.Source.Copied != "" {
		below = b.Source.Copied
	}
	to := filepath.Join(b.root, ".run", "operators", b.Name, "manifests")
	if err := os.RemoveAll(to); err != nil {
		return "", err
	}
	if err := copyFiles(to, filepath.Join(b.Module, below), b.Source.Only); err != nil {
		return "", err
	}
	if b.Source.Release != nil {
		if err := b.Source.Release(Release{Folder: to, Module: b.Module, Version: b.Version, Home: b.Home}); err != nil {
			return "", fmt.Errorf("following the operator's release: %w", err)
		}
	}
	rest, err := filepath.Rel(below, published)
	return filepath.Join(to, rest), err
}

// copyFiles copies a folder, or only the named files of it.
func copyFiles(to, from string, only []string) error {
	if len(only) == 0 {
		return os.CopyFS(to, os.DirFS(from))
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, name := range only {
		text, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// template renders a chart as helm would install it, with the values of the trial.
func (b *Built) template(ctx context.Context, chart string) ([]byte, error) {
	values, err := b.manifest("values.yaml", "$(VERSION)", b.Version)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(filepath.Dir(chart), "values.yaml")
	if err := os.WriteFile(file, values, 0o644); err != nil {
		return nil, fmt.Errorf("writing the values: %w", err)
	}
	helm, err := tools.Program(ctx, b.root, "helm", "helm")
	if err != nil {
		return nil, err
	}
	return run(ctx, helm,
		"template", b.Name, chart, "--namespace", b.Home, "--include-crds", "--kube-version", b.cluster, "--values", file)
}

// run returns what a program prints. An error holds what it complained of.
func run(ctx context.Context, program string, args ...string) ([]byte, error) {
	out, err := exec.CommandContext(ctx, program, args...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
	}
	return out, failure.Wrap(err, "running %s", filepath.Base(program))
}

var variablePattern = regexp.MustCompile(`\$\{\w+:=([^}]*)\}`)

// withDefaults replaces variables of the form ${NAME:=VALUE} by their values.
func withDefaults(text []byte) []byte { return variablePattern.ReplaceAll(text, []byte("$1")) }

// certManagerRelease does what make/manifests.mk of cert-manager does: it names the version in
// Chart.yaml, and makes the definitions a template.
func certManagerRelease(r Release) error {
	text, err := os.ReadFile(filepath.Join(r.Folder, "Chart.template.yaml"))
	if err != nil {
		return err
	}
	chart := regexp.MustCompile(`(?m)^((?:appV|v)ersion): .*$`).ReplaceAll(text, []byte("$1: "+r.Version))
	chart = bytes.ReplaceAll(chart, []byte("{{IS_PRERELEASE}}"), []byte("false"))
	definitions, err := concatenate(os.DirFS(r.Module), "deploy/crds/*.yaml")
	if err != nil {
		return err
	}
	template := "{{- if .Values.installCRDs }}\n" + string(definitions) + "{{- end }}\n"
	return errors.Join(
		os.WriteFile(filepath.Join(r.Folder, "Chart.yaml"), chart, 0o644),
		os.WriteFile(filepath.Join(r.Folder, "templates", "crds.yaml"), []byte(template), 0o644),
	)
}

// concatenate returns the documents of all files that match.
func concatenate(folder fs.FS, pattern string) ([]byte, error) {
	files, err := fs.Glob(folder, pattern)
	if err != nil || len(files) == 0 {
		return nil, errors.Join(err, fmt.Errorf("no file matches %s", pattern))
	}
	var documents [][]byte
	for _, file := range files {
		text, err := fs.ReadFile(folder, file)
		if err != nil {
			return nil, err
		}
		documents = append(documents, append(bytes.TrimRight(text, "\n"), '\n'))
	}
	return bytes.Join(documents, []byte("---\n")), nil
}

// clusterAPIRelease does what the target manifest-modification of Cluster API's Makefile does:
// it names the published image, and its pull policy.
func clusterAPIRelease(r Release) error {
	return errors.Join(
		edit(filepath.Join(r.Folder, "default", "manager_image_patch.yaml"), `image: .*`, "image: "+clusterAPIImage+":"+r.Version),
		edit(filepath.Join(r.Folder, "default", "manager_pull_policy.yaml"), `imagePullPolicy: .*`, "imagePullPolicy: IfNotPresent"),
	)
}

// prometheusOperatorRelease sets the namespace, by the command of the operator's documentation:
// kustomize edit set namespace.
func prometheusOperatorRelease(r Release) error {
	return edit(filepath.Join(r.Folder, "kustomization.yaml"), `\z`, "namespace: "+r.Home+"\n")
}

// edit replaces what matches an expression in a file. It is an error if nothing matches.
func edit(file, expression, replacement string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	pattern := regexp.MustCompile(expression)
	if !pattern.Match(text) {
		return fmt.Errorf("%s has no %s", filepath.Base(file), expression)
	}
	return os.WriteFile(file, pattern.ReplaceAll(text, []byte(replacement)), 0o644)
}
