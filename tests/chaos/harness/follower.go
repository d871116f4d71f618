package harness

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
)

// Follower reads what is appended to the files that match Pattern. It also reads the rest of
// files that are renamed or deleted.
type Follower struct {
	Pattern string
	files   map[uint64]*followed // by inode
}

type followed struct {
	file *os.File
	rest []byte // an incomplete last line
}

// Read calls visit with the whole lines that were appended since the last call.
func (f *Follower) Read(visit func(lines []byte) error) error {
	paths, err := filepath.Glob(f.Pattern)
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

func (f *Follower) open(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || strings.HasSuffix(path, ".gz") { // a compressed file was read before its compression
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

// ContainerLog returns the pattern of the log files of a pod's only container.
func (w *Testbed) ContainerLog(p *corev1.Pod) string {
	pod := fmt.Sprintf("%s_%s_%s", p.Namespace, p.Name, p.UID)
	return filepath.Join(w.Root, ".run", p.Spec.NodeName, "pods", pod, "main", "*.log*")
}
