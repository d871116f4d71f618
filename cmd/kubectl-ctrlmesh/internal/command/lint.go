package command

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/lint"
)

func (e *environment) lintCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "lint -f FILE...", Short: "Say what admission would say about objects in files", Args: cobra.NoArgs,
		Long: "Say what admission would say about objects of the mesh's kinds in files. It asks no apiserver, and knows no other objects than those of the files.",
	}
	files := c.Flags().StringSliceP("filename", "f", nil, "files in YAML or JSON; - for the standard input")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if len(*files) == 0 {
			return errors.New("no file: name some by -f")
		}
		var documents []lint.Document
		for _, file := range *files {
			some, err := e.parse(file)
			if err != nil {
				return err
			}
			documents = append(documents, some...)
		}
		result, err := lint.Run(c.Context(), documents, cmp.Or(*e.flags.Namespace, "default"), e.meshNamespace)
		if err != nil {
			return err
		}
		return e.print(result, result.Refusals())
	}
	return c
}

// parse reads the documents of a file.
func (e *environment) parse(file string) ([]lint.Document, error) {
	from := e.In
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from = f
	}
	return lint.Parse(file, from)
}

// objects reads the objects of a file.
func (e *environment) objects(file string) (out []*unstructured.Unstructured, err error) {
	documents, err := e.parse(file)
	for _, d := range documents {
		if d.Err != nil {
			return nil, fmt.Errorf("%s: parsing document %d: %w", file, d.Number, d.Err)
		}
		out = append(out, d.Objects...)
	}
	return out, err
}
