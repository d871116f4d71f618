package kube

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

// Mark is a time and an offset in the audit log, at which the requests since then begin.
type Mark struct {
	At     time.Time
	file   os.FileInfo
	offset int64 // of the beginning of a line
}

// Mark returns a mark of the current time.
func (c *Cluster) Mark() (m Mark, err error) {
	f, err := os.Open(c.AuditLog())
	if err == nil {
		defer func() { _ = f.Close() }()
		m.file, m.offset, err = lastLine(f)
	}
	m.At = time.Now() // later: what is recorded before the offset was received before this
	return m, failure.Wrap(err, "reading the audit log")
}

// AuditLog returns the path of the apiserver's audit log.
func (c *Cluster) AuditLog() string { return filepath.Join(c.Root, ".run", "audit.log") }

// readAudit reads the audit log from m on.
func (c *Cluster) readAudit(m Mark, read func(log io.Reader) error) error {
	f, err := os.Open(c.AuditLog())
	if err == nil {
		defer func() { _ = f.Close() }()
		err = m.seek(f)
	}
	if err != nil {
		return fmt.Errorf("reading the audit log: %w", err)
	}
	return read(f)
}

// seek moves to where the mark is. It returns an error if the file is another one: what was recorded
// meanwhile cannot be read, and must not count as nothing.
func (m Mark) seek(f *os.File) error {
	info, err := f.Stat()
	if err == nil && m.file != nil && !os.SameFile(m.file, info) {
		err = errors.New("it was replaced since the mark")
	}
	if err == nil {
		_, err = f.Seek(m.offset, io.SeekStart)
	}
	return err
}

// lastLine returns the file, and the offset of the line that the apiserver is writing, or of the next one.
func lastLine(f *os.File) (os.FileInfo, int64, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	last := make([]byte, min(info.Size(), longestLine))
	begin := info.Size() - int64(len(last))
	if _, err := f.ReadAt(last, begin); err != nil {
		return nil, 0, err
	}
	return info, begin + int64(bytes.LastIndexByte(last, '\n')) + 1, nil
}

// longestLine is the upper bound, in bytes, of a line of the audit log.
const longestLine = 4 << 20

// RequestLog reads the requests of callers since a mark, and remembers how far it has read.
// It is not safe for concurrent use.
type RequestLog struct {
	cluster *Cluster
	next    Mark
	record  audit.Record
}

// RequestLog returns a log of the callers' requests since m.
func (c *Cluster) RequestLog(m Mark, of audit.Callers) *RequestLog {
	of.Since = m.At
	return &RequestLog{cluster: c, next: m, record: audit.Record{Of: of}}
}

// Requests returns all requests that the apiserver has recorded so far. Each call reads only
// what was recorded since the last one, so it can be polled.
func (l *RequestLog) Requests() ([]audit.Request, error) {
	err := l.cluster.readAudit(l.next, func(log io.Reader) error {
		length, err := l.record.Read(log)
		l.next.offset += length
		return err
	})
	return l.record.Requests(), err
}

// Requests returns the callers' requests that the apiserver has recorded so far. It reads the
// whole audit log: use a [RequestLog] to poll.
func (c *Cluster) Requests(of audit.Callers) ([]audit.Request, error) {
	return c.RequestLog(Mark{At: of.Since}, of).Requests()
}

// PodRequests returns the requests of pods (namespace/name) since m, as the apiserver recorded
// them.
func (c *Cluster) PodRequests(m Mark, pods ...string) ([]audit.Request, error) {
	return c.RequestLog(m, audit.Callers{Pods: pods}).Requests()
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
	requests, err = c.RequestLog(m, audit.Callers{Users: []string{audit.ServiceAccount(root.Namespace, account)}}).Requests()
	return states, requests, err
}
