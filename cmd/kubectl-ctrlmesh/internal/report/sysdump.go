package report

import "github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"

// Sysdump is an archive with the state of the mesh.
type Sysdump struct {
	File  string `json:"file"`
	Bytes int64  `json:"bytes"`
	Files int    `json:"files"`
	// Missing says what could not be read, and why.
	Missing []string `json:"missing,omitempty"`
}

// WriteText implements render.Report.
func (s Sysdump) WriteText(t *render.Text) {
	t.Line("%s: %d files, %.1f MB", s.File, s.Files, float64(s.Bytes)/1e6)
	for _, m := range s.Missing {
		t.Line("! %s", m)
	}
	t.Line("Look through it before you pass it on: it has names, logs and messages of this cluster.")
}
