package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// tree is the files of a layer by their paths, which have no slash at the start.
type tree map[string]file

type file struct {
	link string // a symbolic link to it
	mode int64
	body []byte
}

// program adds an executable file.
func (t tree) program(name, from string) error {
	body, err := os.ReadFile(from)
	t[name] = file{mode: 0o755, body: body}
	return err
}

func (t tree) text(name, body string) { t[name] = file{mode: 0o644, body: []byte(body)} }
func (t tree) link(name, to string)   { t[name] = file{mode: 0o777, link: to} }

// untar adds what a tar has and keep accepts.
func (t tree) untar(from io.Reader, keep func(name string) bool) error {
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if !keep(name) {
			continue
		}
		switch h.Typeflag {
		case tar.TypeReg:
			body, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			t[name] = file{mode: h.Mode & 0o777, body: body}
		case tar.TypeSymlink:
			t.link(name, h.Linkname)
		case tar.TypeDir: // made for the files that are in it
		default:
			return fmt.Errorf("%s has a type that no image needs: %c", name, h.Typeflag)
		}
	}
}

// layer returns the files and their directories as a compressed layer. A directory comes before
// what is in it.
func (t tree) layer() (v1.Layer, error) {
	all := maps.Clone(t)
	for name := range t {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if _, ok := all[d+"/"]; !ok {
				all[d+"/"] = file{mode: 0o755}
			}
		}
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		f := all[name]
		h := &tar.Header{Name: name, Mode: f.mode, Typeflag: tar.TypeReg, Size: int64(len(f.body)), Linkname: f.link}
		if f.link != "" {
			h.Typeflag = tar.TypeSymlink
		} else if strings.HasSuffix(name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.body); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}
