package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/textproto"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/hack/release/layer"
)

// debianPackage is an installed package of Debian.
type debianPackage struct{ name, version, architecture string }

// dropped are the files of packages that nothing in an image reads.
var dropped = []string{
	"usr/share/man/*", "usr/share/locale/*", "usr/share/lintian/*", "usr/share/bug/*", "usr/share/gcc/*",
	"usr/share/doc-base/*", "usr/share/base-files/*", "usr/share/sensible-utils/*", "usr/share/common-licenses/*", "etc/init.d/*",
	"usr/lib/*/gconv/*", "etc/update-motd.d/*", "etc/dpkg/*", "usr/share/info/*", "usr/share/iptables/*",
}

// kept reports whether an image needs the file of a package. Licenses stay.
func kept(name string) bool {
	if strings.HasPrefix(name, "usr/share/doc/") {
		return path.Base(name) == "copyright"
	}
	for dir := name; dir != "."; dir = path.Dir(dir) {
		for _, d := range dropped {
			if ok, _ := path.Match(d, dir); ok {
				return false
			}
		}
	}
	return true
}

// install adds the packages of a directory that wanted accepts to a layer, and the records of them that
// scanners of images read.
func install(t layer.Files, dir string, wanted func(name string) bool) ([]debianPackage, error) {
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return nil, err
	}
	slices.Sort(debs)
	var installed []debianPackage
	for _, deb := range debs {
		p, control, err := describe(deb)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", filepath.Base(deb), err)
		}
		if !wanted(p.name) {
			continue
		}
		files, err := exec.Command("dpkg-deb", "--fsys-tarfile", deb).Output()
		if err == nil {
			err = t.Untar(bytes.NewReader(files), kept)
		}
		if err != nil {
			return nil, fmt.Errorf("unpacking %s: %w", filepath.Base(deb), err)
		}
		t.Text("var/lib/dpkg/status.d/"+p.name, control)
		installed = append(installed, p)
	}
	return installed, nil
}

// describe returns a package, and its control file.
func describe(deb string) (debianPackage, string, error) {
	control, err := exec.Command("dpkg-deb", "--field", deb).Output()
	if err != nil {
		return debianPackage{}, "", err
	}
	// A control file has the form of headers of mail.
	h, err := textproto.NewReader(bufio.NewReader(io.MultiReader(bytes.NewReader(control), strings.NewReader("\n")))).ReadMIMEHeader()
	if err != nil {
		return debianPackage{}, "", err
	}
	return debianPackage{name: h.Get("Package"), version: h.Get("Version"), architecture: h.Get("Architecture")}, string(control), nil
}

// trust makes one file of the public CAs in a layer, as update-ca-certificates does.
func trust(t layer.Files) error {
	var names []string
	for name := range t {
		if strings.HasPrefix(name, "usr/share/ca-certificates/mozilla/") {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return fmt.Errorf("the package ca-certificates is missing, or has no certificates")
	}
	slices.Sort(names)
	var all strings.Builder
	for _, name := range names {
		all.Write(bytes.TrimSpace(t[name].Body))
		all.WriteByte('\n')
		delete(t, name)
	}
	t.Text("etc/ssl/certs/ca-certificates.crt", all.String())
	return nil
}
