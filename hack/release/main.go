// Command release makes the images of the mesh, and what a release says about them.
//
//	release images -repository R -tag T -dir DIR ARCHITECTURE...
//	release push -repository R IMAGE.tar...
//	release chart -repository R -tag T -dir DIR CHART
//	release krew -tag T PLUGIN.tar.gz...
//
// ARCHITECTURE is a directory with the name of one, as Go has it. In it are the programs and, in
// packages, the packages of Debian. The same input gives the same output.
package main

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("which of images, push, chart and krew?")
	}
	var r release
	fs := flag.NewFlagSet(args[0], flag.ContinueOnError)
	fs.StringVar(&r.repository, "repository", "localhost/ctrlmesh", "registry and folder of the images")
	fs.StringVar(&r.tag, "tag", "dev", "version of the release, and tag of the images")
	fs.StringVar(&r.dir, "dir", ".", "directory of the images")
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	r.repository = strings.TrimSuffix(r.repository, "/")
	switch args[0] {
	case "images":
		seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH is not the time of the commit in Unix seconds: %w", err)
		}
		r.created = time.Unix(seconds, 0).UTC()
		return r.buildImages(fs.Args())
	case "push":
		return r.push(fs.Args())
	case "chart":
		return r.chart(fs.Arg(0))
	case "krew":
		return r.krew(os.Stdout, fs.Args())
	}
	return fmt.Errorf("%q is none of images, push, chart and krew", args[0])
}

// release is what all parts of a release share.
type release struct {
	repository, tag, dir string
	created              time.Time
}
