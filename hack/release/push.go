package main

import (
	"fmt"
	"path"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// push pushes archives to a registry, with the credentials of docker login. Their names and tags stay.
func (r *release) push(archives []string) error {
	if len(archives) == 0 {
		return fmt.Errorf("no archive of an image was given")
	}
	for _, archive := range archives {
		if err := r.pushOne(archive); err != nil {
			return fmt.Errorf("pushing %s: %w", archive, err)
		}
	}
	return nil
}

func (r *release) pushOne(archive string) error {
	o, err := open(archive)
	if err != nil {
		return err
	}
	defer o.Close()
	to, err := name.ParseReference(r.repository + "/" + path.Base(o.annotations[annotationName]))
	if err != nil {
		return err
	}
	if err := remote.WriteIndex(to, o.index, remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
		return err
	}
	digest, err := o.index.Digest()
	fmt.Printf("%s@%s\n", to, digest)
	return err
}
