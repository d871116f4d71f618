// Package crd contains the CustomResourceDefinitions, so that the manager knows their bounds.
package crd

import "embed"

// Files are the definitions, by names such as ctrlmesh.kusionstack.io_circuitbreakers.yaml.
//
//go:embed *_*.yaml
var Files embed.FS
