package trial

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Built is an operator that can be deployed.
type Built struct {
	*Operator
	Version string
	// Module is the folder of the operator's module in the module cache; empty for
	// kube-controller-manager, which needs no file of it.
	Module string
	image  string
}

// buildFlags must be the same in all runs, so that the go command reuses its cache.
var buildFlags = []string{"build", "-p=1", "-trimpath", "-ldflags=-s -w"}

// Build compiles the operator from its published module, unless the cache has it, and loads its
// image into all nodes.
func Build(ctx context.Context, c *kube.Cluster, o *Operator) (*Built, error) {
	b := &Built{Operator: o, image: "localhost/operators/" + o.Name + ":trial"}
	program, err := b.program(ctx, c.Root)
	if err != nil {
		return nil, fmt.Errorf("building %s: %w", o.Name, err)
	}
	archive := filepath.Join(c.Root, ".run", "operators", o.Name+".tar")
	if err := os.MkdirAll(filepath.Dir(archive), 0o755); err != nil {
		return nil, fmt.Errorf("packing %s: %w", o.Name, err)
	}
	scripts := filepath.Join(c.Root, "tests", "cluster")
	if err := runScript(ctx, filepath.Join(scripts, "image.sh"), b.image, archive, program+"="+o.Command[0]); err != nil {
		return nil, fmt.Errorf("packing %s: %w", o.Name, err)
	}
	return b, failure.Wrap(runScript(ctx, filepath.Join(scripts, "load.sh"), archive), "loading the image of %s", o.Name)
}

// program returns the path of the compiled program, and sets the version and the module.
func (b *Built) program(ctx context.Context, root string) (string, error) {
	if b.Name == KubeControllerManager {
		program, err := filepath.EvalSymlinks(filepath.Join(root, ".run", "bin", KubeControllerManager))
		if err != nil {
			return "", fmt.Errorf("finding the cluster's own build: %w", err)
		}
		out, err := exec.CommandContext(ctx, filepath.Join(root, ".run", "bin", KubeControllerManager), "--version").Output()
		b.Version = strings.TrimSpace(strings.TrimPrefix(string(out), "Kubernetes"))
		return program, err
	}
	source := filepath.Join(root, "tests", "operators", "real", "src", b.Name)
	tool, err := b.locate(ctx, source)
	if err != nil {
		return "", err
	}
	key, err := hashFiles(filepath.Join(source, "go.mod"), filepath.Join(source, "go.sum"))
	if err != nil {
		return "", err
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	program := filepath.Join(cache, "operator-"+b.Name+"-"+b.Version+"-"+key, "operator")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		return "", fmt.Errorf("making room in the cache: %w", err)
	}
	partial := fmt.Sprintf("%s.new.%d", program, os.Getpid())
	defer func() { _ = os.Remove(partial) }()
	if _, err := goCommand(ctx, source, append(buildFlags, "-o", partial, tool)...); err != nil {
		return "", err
	}
	return program, os.Rename(partial, program)
}

// locate sets the version and the module's folder, and returns the package of the program.
func (b *Built) locate(ctx context.Context, source string) (tool string, err error) {
	text, err := goCommand(ctx, source, "mod", "edit", "-json")
	if err != nil {
		return "", err
	}
	var file struct{ Tool []struct{ Path string } }
	if err := json.Unmarshal(text, &file); err != nil {
		return "", fmt.Errorf("reading go.mod: %w", err)
	}
	if len(file.Tool) != 1 {
		return "", fmt.Errorf("go.mod must name one tool, not %d", len(file.Tool))
	}
	tool = file.Tool[0].Path
	text, err = goCommand(ctx, source, "list", "-f", "{{.Module.Version}} {{.Module.Dir}}", tool)
	if err != nil {
		return "", err
	}
	var ok bool
	if b.Version, b.Module, ok = strings.Cut(strings.TrimSpace(string(text)), " "); !ok {
		return "", fmt.Errorf("the module of %s is not in the module cache", tool)
	}
	return tool, nil
}

// goCommand runs the go command as quietly as possible: what else runs on the machine comes first.
func goCommand(ctx context.Context, dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "nice", append([]string{"-n", "19", "go"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-buildvcs=false")
	out, err := cmd.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
	}
	return out, err
}

func runScript(ctx context.Context, script string, args ...string) error {
	cmd := exec.CommandContext(ctx, script, args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("running %s: %w: %s", filepath.Base(script), err, strings.TrimSpace(string(out)))
	}
	return nil
}

func hashFiles(files ...string) (string, error) {
	h := sha256.New()
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("hashing the module: %w", err)
		}
		_, _ = h.Write(text)
	}
	return fmt.Sprintf("%x", h.Sum(nil))[:10], nil
}

// cacheDir returns the folder in which the tests keep builds, as tests/cluster does.
func cacheDir() (string, error) {
	if dir := os.Getenv("CTRLMESH_CACHE"); dir != "" {
		return dir, nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache: %w", err)
	}
	return filepath.Join(dir, "ctrlmesh"), nil
}
