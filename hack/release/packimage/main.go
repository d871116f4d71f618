// packimage -o OUT.tar -ref NAME:TAG [-entrypoint A,B] [-cmd A,B] [-env K=V,K=V] [-user U] [-with-libs PATH]... SOURCE...
//
// packs files as an image of one layer, in the archive format of docker save. A SOURCE is
//
//	FILE=DEST     one file
//	DIR=DEST/     all files below DIR
//	LINK@TARGET   a symbolic link
//
// and -with-libs adds a dynamically linked program, or a directory of shared objects, at its own place
// together with the shared libraries that ldd finds for it. The same input gives the same image.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/ctrlmesh/ctrlmesh/hack/release/layer"
)

// files is the image's file tree.
type files struct{ layer.Files }

func main() {
	log.SetFlags(0)
	tree := files{layer.Files{"tmp/": {Mode: 0o1777}}}
	tree.Text("etc/passwd", "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
	tree.Text("etc/group", "root:x:0:\nnobody:x:65534:\n")
	config := v1.Config{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}
	list := func(to *[]string) func(string) error {
		return func(s string) error { *to = strings.Split(s, ","); return nil }
	}
	out := flag.String("o", "", "the tar to write")
	ref := flag.String("ref", "", "the image's name:tag")
	flag.Func("entrypoint", "", list(&config.Entrypoint))
	flag.Func("cmd", "", list(&config.Cmd))
	flag.Func("env", "", list(&config.Env))
	flag.StringVar(&config.User, "user", "", "")
	flag.Func("with-libs", "a program or directory to add with its libraries", tree.addWithLibs)
	flag.Parse()
	if *out == "" || *ref == "" {
		flag.Usage()
		os.Exit(2)
	}
	pack(*out, *ref, config, tree, flag.Args())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func pack(out, ref string, config v1.Config, tree files, sources []string) {
	tag := must(name.NewTag(ref))
	for _, source := range sources {
		check(tree.addSource(source))
	}
	// Not compressed: the image is only copied on this machine.
	image := must(mutate.AppendLayers(empty.Image, static.NewLayer(must(tree.Tar()), types.DockerUncompressedLayer)))
	file := must(image.ConfigFile()).DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	image = must(mutate.ConfigFile(image, file))
	// Renamed into place, so that no process loads half an image.
	check(tarball.WriteToFile(out+".new", tag, image))
	check(os.Rename(out+".new", out))
	fmt.Println(ref, must(image.Digest()))
}

func (f files) addSource(source string) error {
	if link, target, ok := strings.Cut(source, "@"); ok {
		f.Link(strings.TrimPrefix(link, "/"), target)
		return nil
	}
	src, dest, ok := strings.Cut(source, "=")
	if !ok {
		return fmt.Errorf("neither FILE=DEST nor LINK@TARGET: %q", source)
	}
	if info, err := os.Stat(src); err != nil {
		return err
	} else if !info.IsDir() && strings.HasSuffix(dest, "/") {
		dest += filepath.Base(src)
	}
	return f.add(src, dest)
}

// add adds src, a file or a directory with all files below it, at dest.
func (f files) add(src, dest string) error {
	if info, err := os.Stat(src); err != nil {
		return err
	} else if !info.IsDir() {
		return f.addFile(src, dest, info)
	}
	return filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		at := path.Join(dest, rel)
		if d.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(p)
			f.Link(strings.Trim(at, "/"), target)
			return err
		}
		info, err := d.Info()
		return errors.Join(err, f.addFile(p, at, info))
	})
}

func (f files) addFile(src, dest string, info fs.FileInfo) error {
	body, err := os.ReadFile(src)
	f.Files[strings.Trim(dest, "/")] = layer.File{Mode: int64(info.Mode().Perm()), Body: body}
	return err
}

func (f files) addWithLibs(src string) error {
	src, err := filepath.Abs(src)
	if err != nil {
		return err
	}
	objects := []string{src}
	if info, err := os.Stat(src); err != nil {
		return err
	} else if info.IsDir() {
		objects, _ = filepath.Glob(src + "/*")
	}
	out, err := exec.Command("ldd", objects...).Output()
	if err != nil {
		return fmt.Errorf("ldd %s: %w", src, err)
	}
	added := []string{src}
	for line := range strings.Lines(string(out)) {
		// "libc.so.6 => /lib/libc.so.6 (0x..)", "/lib64/ld-linux.so.2 (0x..)", "linux-vdso.so.1 (0x..)"
		if strings.Contains(line, "not found") {
			return fmt.Errorf("%s needs %s", src, strings.TrimSpace(line))
		}
		if fields := strings.Fields(line); len(fields) >= 2 && strings.HasPrefix(fields[len(fields)-1], "(") {
			if lib := fields[len(fields)-2]; strings.HasPrefix(lib, "/") {
				added = append(added, lib)
			}
		}
	}
	for _, p := range added {
		if err := f.add(p, p); err != nil {
			return err
		}
	}
	return nil
}
