package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

func digestOf(archive string) (v1.Hash, error) {
	o, err := open(archive)
	if err != nil {
		return v1.Hash{}, err
	}
	defer o.Close()
	return o.index.Digest()
}

// chart writes into the values of a chart where the images of the release are, by their digests.
func (r *release) chart(dir string) error {
	file := filepath.Join(dir, "values.yaml")
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading the chart: %w", err)
	}
	values := string(b)
	set := func(pattern, value string) {
		at := regexp.MustCompile(`(?ms)^` + pattern).FindStringSubmatchIndex(values)
		if err == nil && at == nil {
			err = fmt.Errorf("the values of the chart have no line for %s", value)
		}
		if err == nil {
			values = values[:at[2]] + value + values[at[3]:]
		}
	}
	set(`image:\n.*?^  registry: ([^\n]*)$`, r.repository)
	set(`image:\n.*?^  tag: ([^\n]*)$`, fmt.Sprintf("%q", r.tag))
	for _, recipe := range recipes {
		digest, err := digestOf(filepath.Join(r.dir, recipe.name+".tar"))
		if err != nil {
			return fmt.Errorf("reading the image %s: %w", recipe.name, err)
		}
		set(`image:\n.*?^  `+recipe.name+`:\n.*?^    digest: ([^\n]*)$`, digest.String())
	}
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(values), 0o644)
}
