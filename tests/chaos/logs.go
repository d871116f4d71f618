package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// follower reads what is added to some files, also to those that are renamed or
// removed meanwhile.
type follower struct {
	pattern string
	files   map[uint64]*followed // by inode
}

type followed struct {
	file *os.File
	rest []byte // of a line still being written
}

// read calls visit with whole lines that are new.
func (f *follower) read(visit func(lines []byte) error) error {
	paths, err := filepath.Glob(f.pattern)
	if err != nil {
		return fmt.Errorf("finding logs: %w", err)
	}
	for _, path := range paths {
		if err := f.open(path); err != nil {
			return err
		}
	}
	for _, file := range f.files {
		added, err := io.ReadAll(file.file)
		if err != nil {
			return fmt.Errorf("reading %s: %w", file.file.Name(), err)
		}
		all := append(file.rest, added...)
		end := bytes.LastIndexByte(all, '\n') + 1
		file.rest = bytes.Clone(all[end:])
		if end > 0 {
			if err := visit(all[:end]); err != nil {
				return fmt.Errorf("%s: %w", file.file.Name(), err)
			}
		}
	}
	return nil
}

func (f *follower) open(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || strings.HasSuffix(path, ".gz") { // read while it was not
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading logs: %w", err)
	}
	inode := info.Sys().(*syscall.Stat_t).Ino
	if f.files[inode] != nil {
		return nil
	}
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading logs: %w", err)
	}
	if f.files == nil {
		f.files = map[uint64]*followed{}
	}
	f.files[inode] = &followed{file: file}
	return nil
}

// accessLines are those of all agents, past and present.
type accessLines struct {
	root string

	mu     sync.Mutex
	lines  []audit.Access
	failed error
}

// follow reads the agents' logs until ctx ends. Those of an agent that is replaced
// are removed with it, some seconds later.
func (a *accessLines) follow(ctx context.Context) {
	logs := follower{pattern: filepath.Join(a.root, ".run", "*", "pods", kube.SystemNamespace+"_"+kube.AgentName+"-*", "*", "*.log*")}
	for {
		err := logs.read(func(text []byte) error {
			lines, err := audit.AccessLines(bytes.NewReader(text))
			a.mu.Lock()
			defer a.mu.Unlock()
			a.lines = append(a.lines, lines...)
			return err
		})
		if err != nil {
			a.mu.Lock()
			a.failed = err
			a.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// missing are the requests of which no line tells.
func (a *accessLines) missing(requests []audit.Request) ([]audit.Request, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(requests) > 0 && len(a.lines) == 0 && a.failed == nil {
		return nil, errors.New("the agents' logs have no access lines: do the agents log at debug level (make install)?")
	}
	return audit.Leaked(requests, a.lines), a.failed
}

// mark is a moment, and a place in the audit log.
type mark struct {
	at     time.Time
	offset int64
}

func (w *world) mark() (mark, error) {
	info, err := os.Stat(w.AuditLog())
	if err != nil {
		return mark{}, fmt.Errorf("reading the audit log: %w", err)
	}
	return mark{time.Now(), info.Size()}, nil
}

// since is the audit log from m on.
func (w *world) since(m mark) (*os.File, error) {
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

// seekLine goes to the beginning of the line that has the byte before offset, or
// that begins at offset: m may have been made while the apiserver wrote one.
func seekLine(f *os.File, offset int64) error {
	before := make([]byte, min(offset, longestLine))
	if _, err := f.ReadAt(before, offset-int64(len(before))); err != nil {
		return err
	}
	_, err := f.Seek(offset-int64(len(before))+int64(bytes.LastIndexByte(before, '\n'))+1, io.SeekStart)
	return err
}

// longestLine is more than the audit log has of one request.
const longestLine = 4 << 20

// requests are those of the pods (namespace/name) since m, as the apiserver recorded them.
func (w *world) requests(m mark, pods ...string) ([]audit.Request, error) {
	f, err := w.since(m)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return audit.Requests(f, audit.Callers{Pods: pods, Since: m.at})
}

// leaks are those requests that no access line tells of, given some seconds to do
// so. What an agent had in hand when it was killed is none.
func (w *world) leaks(ctx context.Context, requests []audit.Request, kills []time.Time) ([]audit.Request, error) {
	toTheMesh, failed := w.toTheMesh()
	if failed != nil {
		return nil, failed
	}
	var leaked, cut []audit.Request
	ctx, cancel := context.WithTimeout(ctx, kube.Settle)
	defer cancel()
	_ = kube.Until(ctx, "access lines", func(context.Context) error {
		missing, err := w.lines.missing(requests)
		if failed = err; err != nil {
			return kube.Never(err)
		}
		if leaked, cut = audit.CutOff(missing, kills, toTheMesh); len(leaked) > 0 {
			return fmt.Errorf("%d are missing", len(leaked))
		}
		return nil
	})
	if len(cut) > 0 {
		w.say("  %d requests were in the hands of an agent when it was killed", len(cut))
	}
	for _, r := range leaked[:min(3, len(leaked))] {
		w.say("  ! leaked: %s", r)
	}
	return leaked, failed
}

// toTheMesh returns what tells whether a request was sent to the mesh and to nobody
// else, by the certificates that members saw.
func (w *world) toTheMesh() (func(id string) bool, error) {
	sent := map[string]bool{}
	for _, m := range w.members {
		all, err := m.asked()
		if err != nil {
			return nil, err
		}
		for _, b := range all {
			sent[b.ID] = len(b.Issuers) > 0 && !b.direct()
		}
	}
	return func(id string) bool { return sent[id] }, nil
}
