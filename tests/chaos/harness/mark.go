package harness

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// Mark is a time and the matching offset in the audit log.
type Mark struct {
	At     time.Time
	offset int64
}

// Mark returns a mark of the current time.
func (w *World) Mark() (Mark, error) {
	info, err := os.Stat(w.AuditLog())
	if err != nil {
		return Mark{}, fmt.Errorf("reading the audit log: %w", err)
	}
	return Mark{time.Now(), info.Size()}, nil
}

// AuditSince opens the audit log at m.
func (w *World) AuditSince(m Mark) (*os.File, error) {
	f, err := os.Open(w.AuditLog())
	if err != nil {
		return nil, fmt.Errorf("reading the audit log: %w", err)
	}
	if err := seekLine(f, m.offset); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("reading the audit log: %w", err)
	}
	return f, nil
}

// seekLine seeks the beginning of the line that contains the byte before offset, or that
// begins at offset: a mark may be taken while the apiserver writes a line.
func seekLine(f *os.File, offset int64) error {
	before := make([]byte, min(offset, longestLine))
	if _, err := f.ReadAt(before, offset-int64(len(before))); err != nil {
		return err
	}
	_, err := f.Seek(offset-int64(len(before))+int64(bytes.LastIndexByte(before, '\n'))+1, io.SeekStart)
	return err
}

// longestLine is the upper bound, in bytes, of a line of the audit log.
const longestLine = 4 << 20

// PodRequests returns the requests of pods (namespace/name) since m, as the apiserver recorded
// them.
func (w *World) PodRequests(m Mark, pods ...string) ([]audit.Request, error) {
	f, err := w.AuditSince(m)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return audit.Requests(f, audit.Callers{Pods: pods, Since: m.At})
}
