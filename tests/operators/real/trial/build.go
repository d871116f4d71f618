package trial

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// Image is an image that an operator's manifests name. Its tag is the version of the module.
type Image struct {
	// Name as in the manifests, without the tag.
	Name string
	// Package of the program, and where the image has it.
	Package, Program string
	// Command is true if the manifests name the program; otherwise it is the entrypoint.
	Command bool
	// Python is true if the program needs the interpreter of this machine and its packages.
	Python bool
	// User that the image names, as of the operator's own Dockerfile.
	User string
}

// Built is an operator that can be deployed.
type Built struct {
	*Operator
	Version string
	// Module is the folder of the operator's module in the module cache; empty for
	// kube-controller-manager, which needs no file of it.
	Module string

	root    string                       // of the repository
	cluster string                       // the cluster's version, which charts may require
	objects []*unstructured.Unstructured // of the operator's manifests
	target  *unstructured.Unstructured   // the workload among them
	// required are the operators that are installed before it.
	required []*Built
}

// buildFlags must be the same in all runs, so that the go command reuses its cache.
var buildFlags = []string{"build", "-p=1", "-trimpath", "-ldflags=-s -w"}

// Build compiles the operator from its published module, unless the cache has it, loads its
// images into all nodes, and renders its manifests. It does so for the operators that it requires, too.
func Build(ctx context.Context, c *kube.Cluster, o *Operator) (*Built, error) {
	version, err := c.Clientset.Discovery().ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("reading the cluster's version: %w", err)
	}
	b := &Built{Operator: o, root: c.Root, cluster: version.GitVersion}
	for _, name := range o.Requires {
		required, err := Build(ctx, c, Find(name))
		if err != nil {
			return nil, err
		}
		b.required = append(b.required, required)
	}
	programs, err := b.programs(ctx)
	if err != nil {
		return nil, fmt.Errorf("building %s: %w", o.Name, err)
	}
	var archives []string
	for _, image := range o.Images {
		archive, err := b.pack(ctx, image, filepath.Join(programs, path.Base(image.Package)))
		if err != nil {
			return nil, fmt.Errorf("packing %s: %w", image.Name, err)
		}
		archives = append(archives, archive)
	}
	if err := runScript(ctx, filepath.Join(c.Root, "tests", "cluster", "load.sh"), archives...); err != nil {
		return nil, fmt.Errorf("loading the images of %s: %w", o.Name, err)
	}
	text, err := b.render(ctx)
	if err != nil {
		return nil, fmt.Errorf("rendering the manifests of %s: %w", o.Name, err)
	}
	return b, failure.Wrap(b.read(text), "reading the manifests of %s", o.Name)
}

// pack makes the archive of an image.
func (b *Built) pack(ctx context.Context, image Image, program string) (archive string, err error) {
	if program, err = filepath.EvalSymlinks(program); err != nil {
		return "", err
	}
	folder := filepath.Join(b.root, ".run", "operators")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	archive = filepath.Join(folder, b.Name+"-"+path.Base(image.Package)+".tar")
	args := []string{reference(image.Name + ":" + b.Version), archive, "-user", image.User}
	if !image.Command {
		args = append(args, "-entrypoint", image.Program)
	}
	if image.Python {
		interpreter, err := python()
		if err != nil {
			return "", err
		}
		args = append(args, interpreter...)
	}
	return archive, runScript(ctx, filepath.Join(b.root, "tests", "cluster", "image.sh"), append(args, program+"="+image.Program)...)
}

// python returns the sources of an image with this machine's Python, as of tests/cluster/image.sh.
func python() ([]string, error) {
	program, err := filepath.EvalSymlinks("/usr/bin/python3")
	if err != nil {
		return nil, fmt.Errorf("finding Python: %w", err)
	}
	library, packages := filepath.Join("/usr/lib", filepath.Base(program)), "/usr/lib/python3/dist-packages"
	return []string{
		"-with-libs", program, "-with-libs", filepath.Join(library, "lib-dynload"),
		"usr/bin/python3@" + filepath.Base(program), library + "=" + library + "/", packages + "=" + packages + "/",
	}, nil
}

// reference returns the name of an image as containerd has it: with the registry.
func reference(image string) string {
	registry, _, found := strings.Cut(image, "/")
	if found && (registry == "localhost" || strings.ContainsAny(registry, ".:")) {
		return image
	}
	return "docker.io/" + image
}

// programs returns the folder of the compiled programs, and sets the version and the module.
func (b *Built) programs(ctx context.Context) (string, error) {
	if b.Name == KubeControllerManager {
		folder := filepath.Join(b.root, ".run", "bin") // the cluster's own build
		out, err := run(ctx, filepath.Join(folder, KubeControllerManager), "--version")
		b.Version = strings.TrimSpace(strings.TrimPrefix(string(out), "Kubernetes"))
		return folder, err
	}
	source := filepath.Join(b.root, "tests", "operators", "real", "src", b.Name)
	if b.Debian != "" {
		version, err := run(ctx, "dpkg-query", "-W", "-f", "${Version}", b.Debian)
		b.Version = string(version)
		return source, err
	}
	tools, err := b.locate(ctx, source)
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
	folder := filepath.Join(cache, "operator-"+b.Name+"-"+b.Version+"-"+key)
	if _, err := os.Stat(folder); err == nil {
		return folder, nil
	}
	partial := fmt.Sprintf("%s.new.%d", folder, os.Getpid())
	defer func() { _ = os.RemoveAll(partial) }()
	if err := os.MkdirAll(partial, 0o755); err != nil {
		return "", fmt.Errorf("creating a folder in the cache: %w", err)
	}
	if _, err := goCommand(ctx, source, slices.Concat(buildFlags, []string{"-o", partial + "/"}, tools)...); err != nil {
		return "", err
	}
	return folder, os.Rename(partial, folder)
}

// locate sets the version and the module's folder, and returns the packages of the programs.
func (b *Built) locate(ctx context.Context, source string) (tools []string, err error) {
	for _, image := range b.Images {
		tools = append(tools, image.Package)
	}
	text, err := goCommand(ctx, source, "list", "-f", "{{.Module.Version}} {{.Module.Dir}}", tools[0])
	if err != nil {
		return nil, err
	}
	var ok bool
	if b.Version, b.Module, ok = strings.Cut(strings.TrimSpace(string(text)), " "); !ok {
		return nil, fmt.Errorf("the module of %s is not in the module cache", tools[0])
	}
	return tools, nil
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
