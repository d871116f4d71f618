package sysdump

import "github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"

// Archive is what was written: the state of the mesh.
type Archive struct {
	File  string `json:"file"`
	Bytes int64  `json:"bytes"`
	Files int    `json:"files"`
	// Missing says what could not be read, and why.
	Missing []string `json:"missing,omitempty"`
}

// WriteText implements render.Report.
func (a Archive) WriteText(t *render.Text) {
	t.Line("%s: %d files, %.1f MB", a.File, a.Files, float64(a.Bytes)/1e6)
	for _, m := range a.Missing {
		t.Line("! %s", m)
	}
	t.Line("Look through it before you pass it on: it has names, logs and messages of this cluster.")
}
