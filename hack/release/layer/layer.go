// Package layer has the files of a layer of an image.
package layer

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
)

// Files are the files of a layer by their paths, which have no slash at the start. Directories end
// with one; those that files need exist without being named.
type Files map[string]File

// File is a file, a symbolic link or a directory.
type File struct {
	Link string // of a symbolic link: what it leads to
	Mode int64
	Body []byte
}

// Program adds an executable file.
func (f Files) Program(name, from string) error {
	body, err := os.ReadFile(from)
	f[name] = File{Mode: 0o755, Body: body}
	return err
}

// Text adds a file.
func (f Files) Text(name, body string) { f[name] = File{Mode: 0o644, Body: []byte(body)} }

// Link adds a symbolic link.
func (f Files) Link(name, to string) { f[name] = File{Mode: 0o777, Link: to} }

// Untar adds what a tar has and keep accepts.
func (f Files) Untar(from io.Reader, keep func(name string) bool) error {
	return Each(from, func(h *tar.Header, content io.Reader) error {
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		switch {
		case !keep(name), h.Typeflag == tar.TypeDir:
		case h.Typeflag == tar.TypeReg:
			body, err := io.ReadAll(content)
			f[name] = File{Mode: h.Mode & 0o777, Body: body}
			return err
		case h.Typeflag == tar.TypeSymlink:
			f.Link(name, h.Linkname)
		default:
			return fmt.Errorf("%s has a type that no image needs: %c", name, h.Typeflag)
		}
		return nil
	})
}

// Each calls use for each entry of a tar, until it returns an error.
func Each(from io.Reader, use func(*tar.Header, io.Reader) error) error {
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = use(h, r)
		}
		if err != nil {
			return err
		}
	}
}

// Tar returns the files and their directories. A directory comes before what is in it, and the
// same files give the same tar.
func (f Files) Tar() ([]byte, error) {
	all := maps.Clone(f)
	for name := range f {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if _, ok := all[d+"/"]; !ok {
				all[d+"/"] = File{Mode: 0o755}
			}
		}
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		e := all[name]
		h := &tar.Header{Name: name, Mode: e.Mode, Typeflag: tar.TypeReg, Size: int64(len(e.Body)), Linkname: e.Link}
		if e.Link != "" {
			h.Typeflag = tar.TypeSymlink
		} else if strings.HasSuffix(name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.Body); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}
