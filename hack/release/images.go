package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/ctrlmesh/ctrlmesh/hack/release/layer"
)

// recipe says how an image is made for one architecture, from the directory of that.
type recipe struct {
	name     string
	program  string
	user     string
	packages []string // of Debian, by the patterns of path.Match
	add      func(layer.Files) error
}

const environment = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

var recipes = []recipe{
	{name: "manager", program: "ctrlmesh-manager", user: "65532", packages: []string{"base-files"}},
	{name: "agent", program: "ctrlmesh-agent", packages: []string{"*"}, add: func(t layer.Files) error {
		for _, name := range []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"} {
			t.Link("usr/sbin/"+name, "xtables-nft-multi")
		}
		// Under these names the agent runs iptables with bounds; see agent/capture/program.
		for _, name := range []string{"iptables", "ip6tables"} {
			t.Link("usr/sbin/"+name+"-bounded", "/ctrlmesh-agent")
		}
		// The public CAs verify other hosts whose TLS is decrypted.
		return trust(t)
	}},
}

// buildImages writes an archive of each image with all architectures, and bills of materials.
func (r *release) buildImages(architectures []string) error {
	if len(architectures) == 0 {
		return fmt.Errorf("no directory of an architecture was given")
	}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return err
	}
	for _, recipe := range recipes {
		images := map[string]v1.Image{}
		for _, dir := range architectures {
			image, err := r.image(recipe, dir)
			if err != nil {
				return fmt.Errorf("making the image %s of %s: %w", recipe.name, filepath.Base(dir), err)
			}
			images[filepath.Base(dir)] = image
		}
		digest, err := r.archive(recipe.name, images)
		if err != nil {
			return fmt.Errorf("writing the image %s: %w", recipe.name, err)
		}
		fmt.Printf("%s@%s\n", r.reference(recipe.name), digest)
	}
	return nil
}

// image makes the image of one architecture: a layer of Debian's packages, which few releases
// change, and one of the program.
func (r *release) image(recipe recipe, dir string) (v1.Image, error) {
	architecture := filepath.Base(dir)
	system := layer.Files{"tmp/": {Mode: 0o1777}}
	packages, err := install(system, filepath.Join(dir, "packages"), func(name string) bool {
		return slices.ContainsFunc(recipe.packages, func(pattern string) bool {
			ok, _ := path.Match(pattern, name)
			return ok
		})
	})
	if err != nil {
		return nil, err
	}
	system.Text("etc/passwd", "root:x:0:0:root:/:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n")
	system.Text("etc/group", "root:x:0:\nnobody:x:65534:\n")
	if recipe.add != nil {
		if err := recipe.add(system); err != nil {
			return nil, err
		}
	}
	own := layer.Files{}
	program := filepath.Join(dir, recipe.program)
	if err := own.Program(recipe.program, program); err != nil {
		return nil, err
	}
	var layers []v1.Layer
	for _, files := range []layer.Files{system, own} {
		one, err := compressed(files)
		if err != nil {
			return nil, err
		}
		layers = append(layers, one)
	}
	if err := r.bill(recipe.name, architecture, program, packages); err != nil {
		return nil, fmt.Errorf("writing the bill of materials: %w", err)
	}
	return r.assemble(recipe, architecture, layers)
}

func compressed(files layer.Files) (v1.Layer, error) {
	b, err := files.Tar()
	if err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b)), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}

func (r *release) assemble(recipe recipe, architecture string, layers []v1.Layer) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", architecture
	config.Created = v1.Time{Time: r.created}
	config.Config = v1.Config{
		Entrypoint: []string{"/" + recipe.program},
		Env:        []string{environment},
		User:       recipe.user,
		Labels: map[string]string{
			"org.opencontainers.image.title":    "ctrlmesh-" + recipe.name,
			"org.opencontainers.image.source":   "https://github.com/ctrlmesh/ctrlmesh",
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.version":  r.tag,
		},
	}
	for i := range config.History {
		config.History[i].Created = config.Created
	}
	return mutate.ConfigFile(image, config)
}

// reference is the name of an image with its tag.
func (r *release) reference(name string) string {
	return r.repository + "/" + name + ":" + r.tag
}
