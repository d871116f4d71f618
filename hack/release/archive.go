package main

import (
	"archive/tar"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/ctrlmesh/ctrlmesh/hack/release/layer"
)

// Annotations by which tools find the name of an image in an archive.
const (
	annotationTag  = "org.opencontainers.image.ref.name"
	annotationName = "io.containerd.image.name"
)

// archive writes NAME.tar: an OCI image layout of an index of all architectures. It returns the
// digest of the index.
func (r *release) archive(name string, images map[string]v1.Image) (v1.Hash, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, architecture := range slices.Sorted(maps.Keys(images)) {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        images[architecture],
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: architecture}},
		})
	}
	digest, err := index.Digest()
	if err != nil {
		return v1.Hash{}, err
	}
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		return v1.Hash{}, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	to, err := layout.Write(dir, mutate.IndexMediaType(empty.Index, types.OCIImageIndex))
	if err != nil {
		return v1.Hash{}, err
	}
	err = to.AppendIndex(index, layout.WithAnnotations(map[string]string{annotationTag: r.tag, annotationName: r.reference(name)}))
	if err != nil {
		return v1.Hash{}, err
	}
	return digest, pack(dir, filepath.Join(r.dir, name+".tar"))
}

// pack writes a tar of what is in a directory. It is renamed into place, so that nobody loads half of it.
func pack(dir, to string) error {
	f, err := os.Create(to + ".new")
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	w := tar.NewWriter(f)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		from, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = from.Close() }()
		if err := w.WriteHeader(&tar.Header{Name: filepath.ToSlash(name), Mode: 0o644, Size: info.Size()}); err != nil {
			return err
		}
		_, err = io.Copy(w, from)
		return err
	})
	if err == nil {
		err = w.Close()
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return err
	}
	return os.Rename(to+".new", to)
}

// opened is an archive that was unpacked. Close it.
type opened struct {
	index       v1.ImageIndex
	annotations map[string]string
	dir         string
}

func (o *opened) Close() { _ = os.RemoveAll(o.dir) }

// open reads an archive that has one index.
func open(archive string) (*opened, error) {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		return nil, err
	}
	o := &opened{dir: dir}
	if err := o.read(archive); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

func (o *opened) read(archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := unpack(f, o.dir); err != nil {
		return err
	}
	all, err := layout.ImageIndexFromPath(o.dir)
	if err != nil {
		return err
	}
	manifest, err := all.IndexManifest()
	if err != nil {
		return err
	}
	if n := len(manifest.Manifests); n != 1 || manifest.Manifests[0].Annotations[annotationName] == "" {
		return fmt.Errorf("it has %d images, not one with a name", n)
	}
	o.annotations = manifest.Manifests[0].Annotations
	o.index, err = all.ImageIndex(manifest.Manifests[0].Digest)
	return err
}

func unpack(from io.Reader, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return layer.Each(from, func(h *tar.Header, content io.Reader) error {
		if err := root.MkdirAll(filepath.Dir(h.Name), 0o755); err != nil {
			return err
		}
		body, err := io.ReadAll(content)
		if err != nil {
			return err
		}
		return root.WriteFile(h.Name, body, 0o644)
	})
}
