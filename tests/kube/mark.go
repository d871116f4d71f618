package kube

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// Mark is a time and an offset in the audit log, at which the requests since then begin.
type Mark struct {
	At     time.Time
	offset int64
}

// Mark returns a mark of the current time.
func (c *Cluster) Mark() (Mark, error) {
	info, err := os.Stat(c.AuditLog())
	if err != nil {
		return Mark{}, fmt.Errorf("reading the audit log: %w", err)
	}
	return Mark{time.Now(), info.Size()}, nil
}

// AuditLog returns the path of the apiserver's audit log.
func (c *Cluster) AuditLog() string { return filepath.Join(c.Root, ".run", "audit.log") }

// readAudit reads the audit log from m on.
func (c *Cluster) readAudit(m Mark, read func(log io.Reader) error) error {
	f, err := os.Open(c.AuditLog())
	if err == nil {
		defer func() { _ = f.Close() }()
		err = seekLine(f, m.offset)
	}
	if err != nil {
		return fmt.Errorf("reading the audit log: %w", err)
	}
	return read(f)
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

// Requests returns the callers' requests that the apiserver has recorded so far.
func (c *Cluster) Requests(of audit.Callers) ([]audit.Request, error) {
	return c.requestsSince(Mark{At: of.Since}, of)
}

// PodRequests returns the requests of pods (namespace/name) since m, as the apiserver recorded
// them.
func (c *Cluster) PodRequests(m Mark, pods ...string) ([]audit.Request, error) {
	return c.requestsSince(m, audit.Callers{Pods: pods})
}

func (c *Cluster) requestsSince(m Mark, of audit.Callers) (requests []audit.Request, err error) {
	of.Since = m.At
	err = c.readAudit(m, func(log io.Reader) (err error) {
		requests, err = audit.Requests(log, of)
		return err
	})
	return requests, err
}

// Evidence returns the states of a root since m, and the requests of a service account in its
// namespace.
func (c *Cluster) Evidence(m Mark, root types.NamespacedName, account string) (states []audit.State, requests []audit.Request, err error) {
	err = c.readAudit(m, func(log io.Reader) (err error) {
		states, err = audit.States(log, root, m.At)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	requests, err = c.requestsSince(m, audit.Callers{Users: []string{audit.ServiceAccount(root.Namespace, account)}})
	return states, requests, err
}
