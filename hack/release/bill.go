package main

import (
	"cmp"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/CycloneDX/cyclonedx-go"
	"github.com/package-url/packageurl-go"
)

// bill writes what an image, or a program without one, consists of, as CycloneDX.
func (r *release) bill(name, architecture, program string, packages []debianPackage) error {
	bom := cyclonedx.NewBOM()
	bom.Metadata = &cyclonedx.Metadata{
		Timestamp: r.created.Format("2006-01-02T15:04:05Z"),
		Component: &cyclonedx.Component{
			BOMRef: "ctrlmesh-" + name, Type: cyclonedx.ComponentTypeContainer, Name: "ctrlmesh-" + name, Version: r.tag,
			Licenses: &cyclonedx.Licenses{{License: &cyclonedx.License{ID: "Apache-2.0"}}},
		},
	}
	components, err := modules(program)
	if err != nil {
		return err
	}
	for _, p := range packages {
		url := packageurl.NewPackageURL(packageurl.TypeDebian, "debian", p.name, p.version, packageurl.QualifiersFromMap(map[string]string{"arch": p.architecture}), "").ToString()
		components = append(components, cyclonedx.Component{BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: p.name, Version: p.version, PackageURL: url})
	}
	bom.Components = &components
	f, err := os.Create(filepath.Join(r.dir, fmt.Sprintf("%s-%s.cdx.json", name, architecture)))
	if err != nil {
		return err
	}
	err = cyclonedx.NewBOMEncoder(f, cyclonedx.BOMFileFormatJSON).SetPretty(true).EncodeVersion(bom, cyclonedx.SpecVersion1_6) // newer than that few scanners read
	return cmp.Or(err, f.Close())
}

// modules returns the modules of which a program of Go was built, and the standard library.
func modules(program string) ([]cyclonedx.Component, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, err
	}
	all := []cyclonedx.Component{module("stdlib", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		all = append(all, module(m.Path, m.Version))
	}
	return all, nil
}

func module(path, version string) cyclonedx.Component {
	dir, name := "", path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		dir, name = path[:i], path[i+1:]
	}
	url := packageurl.NewPackageURL(packageurl.TypeGolang, dir, name, version, nil, "").ToString()
	return cyclonedx.Component{BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: url}
}
