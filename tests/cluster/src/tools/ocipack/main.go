// ocipack -o OUT.tar -ref NAME:TAG [-entrypoint A,B] [-cmd A,B] [-env K=V,K=V] [-user U] [-with-libs PATH]... SOURCE...
//
// packs files as an OCI image of one layer. A SOURCE is
//
//	FILE=DEST     one file
//	DIR=DEST/     all that is below DIR
//	LINK@TARGET   a symbolic link
//
// and -with-libs adds a dynamically linked program, or a directory of shared objects, at its own place
// together with the shared libraries that ldd finds for it. The same input gives the same image.
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// files is the image's file tree: the path in the image, without the leading slash, to what is there.
type files map[string]file

type file struct {
	link string
	mode int64
	body []byte
}

func main() {
	log.SetFlags(0)
	fsys := files{
		"etc/passwd": {mode: 0o644, body: []byte("root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")},
		"etc/group":  {mode: 0o644, body: []byte("root:x:0:\nnobody:x:65534:\n")},
	}
	out := flag.String("o", "", "the tar to write")
	ref := flag.String("ref", "", "the image's name:tag")
	entrypoint := flag.String("entrypoint", "", "")
	command := flag.String("cmd", "", "")
	env := flag.String("env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "")
	user := flag.String("user", "", "")
	flag.Func("with-libs", "a program or directory to add with its libraries", fsys.addWithLibs)
	flag.Parse()
	if *out == "" || *ref == "" {
		flag.Usage()
		os.Exit(2)
	}
	for _, a := range flag.Args() {
		if link, target, ok := strings.Cut(a, "@"); ok {
			fsys[strings.TrimPrefix(link, "/")] = file{link: target, mode: 0o777}
		} else if src, dest, ok := strings.Cut(a, "="); ok {
			fsys.add(src, dest)
		} else {
			log.Fatalf("neither FILE=DEST nor LINK@TARGET: %q", a)
		}
	}
	layer := fsys.layer()

	config := map[string]any{"Env": list(*env)}
	for key, v := range map[string]string{"Entrypoint": *entrypoint, "Cmd": *command} {
		if v != "" {
			config[key] = list(v)
		}
	}
	if *user != "" {
		config["User"] = *user
	}
	platform := map[string]any{"architecture": runtime.GOARCH, "os": "linux"}
	image := encode(map[string]any{"architecture": runtime.GOARCH, "os": "linux", "config": config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}}})
	manifest := encode(map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": descriptor("application/vnd.oci.image.config.v1+json", image),
		// Not compressed: it travels from one directory to the next.
		"layers": []any{descriptor("application/vnd.oci.image.layer.v1.tar", layer)}})
	top := descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
	top["platform"] = platform
	top["annotations"] = map[string]any{"io.containerd.image.name": *ref, "org.opencontainers.image.ref.name": *ref}
	index := encode(map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []any{top}})

	layout := files{
		"oci-layout": {mode: 0o644, body: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		"index.json": {mode: 0o644, body: index},
	}
	for _, b := range [][]byte{manifest, image, layer} {
		layout["blobs/"+strings.Replace(digest(b), ":", "/", 1)] = file{mode: 0o644, body: b}
	}
	// Renamed into place, so that nobody loads half an image.
	tmp := *out + ".new"
	check(os.WriteFile(tmp, layout.tar(), 0o644))
	check(os.Rename(tmp, *out))
	fmt.Println(*ref, digest(manifest))
}

// add puts src, a file or a directory with all that is below it, at dest.
func (f files) add(src, dest string) {
	st, err := os.Stat(src)
	check(err)
	if !st.IsDir() {
		if strings.HasSuffix(dest, "/") {
			dest += filepath.Base(src)
		}
		b, err := os.ReadFile(src)
		check(err)
		f[strings.Trim(dest, "/")] = file{mode: int64(st.Mode().Perm()), body: b}
		return
	}
	check(filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(src, p)
		check(err)
		if d.Type()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(p)
			check(err)
			f[strings.Trim(path.Join(dest, rel), "/")] = file{link: target, mode: 0o777}
		} else {
			f.add(p, path.Join(dest, rel))
		}
		return nil
	}))
}

func (f files) addWithLibs(src string) error {
	src, err := filepath.Abs(src)
	if err != nil {
		return err
	}
	f.add(src, src)
	objects := []string{src}
	if st, err := os.Stat(src); err != nil {
		return err
	} else if st.IsDir() {
		objects, _ = filepath.Glob(src + "/*")
	}
	out, err := exec.Command("ldd", objects...).Output()
	if err != nil {
		return fmt.Errorf("ldd %s: %w", src, err)
	}
	for line := range strings.Lines(string(out)) {
		// "libc.so.6 => /lib/libc.so.6 (0x..)", "/lib64/ld-linux.so.2 (0x..)", "linux-vdso.so.1 (0x..)"
		if strings.Contains(line, "not found") {
			return fmt.Errorf("%s needs %s", src, strings.TrimSpace(line))
		}
		if fields := strings.Fields(line); len(fields) >= 2 && strings.HasPrefix(fields[len(fields)-1], "(") {
			if lib := fields[len(fields)-2]; strings.HasPrefix(lib, "/") {
				f.add(lib, lib)
			}
		}
	}
	return nil
}

// layer is the tree as a file system: with its directories.
func (f files) layer() []byte {
	tree := maps.Clone(f)
	tree["tmp/"] = file{mode: 0o1777}
	for name := range f {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			if _, ok := tree[d+"/"]; !ok {
				tree[d+"/"] = file{mode: 0o755}
			}
		}
	}
	return tree.tar()
}

func (f files) tar() []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	// Sorted: a directory comes before what is in it, and the output depends on nothing but the input.
	for _, name := range slices.Sorted(maps.Keys(f)) {
		e := f[name]
		h := &tar.Header{Name: name, Mode: e.mode, Typeflag: tar.TypeReg, Size: int64(len(e.body)), Linkname: e.link}
		if e.link != "" {
			h.Typeflag = tar.TypeSymlink
		} else if strings.HasSuffix(name, "/") {
			h.Typeflag = tar.TypeDir
		}
		check(w.WriteHeader(h))
		_, err := w.Write(e.body)
		check(err)
	}
	check(w.Close())
	return b.Bytes()
}

func descriptor(mediaType string, b []byte) map[string]any {
	return map[string]any{"mediaType": mediaType, "digest": digest(b), "size": len(b)}
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

func list(s string) []string { return strings.Split(s, ",") }

func encode(v any) []byte {
	b, err := json.Marshal(v)
	check(err)
	return b
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
