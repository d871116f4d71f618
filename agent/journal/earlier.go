package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Earlier is a pod with writes that another agent forwarded.
type Earlier struct {
	UID string
	// Over is closed when no write that the other agent forwarded can take effect any
	// more; nil: now.
	Over <-chan struct{}
}

// Earlier returns the pods of the other journals in the folder. It is complete if the
// agent that served last, which had the given takeover socket, kept one of the journals
// or this one, all of them can be read, and none lacked room for a pod. Journals are
// removed when their agents have exited and no write of theirs can take effect any more.
func (j *Journal) Earlier(last [2]int64) (pods []Earlier, complete bool, err error) {
	boot, err := bootID()
	if err != nil {
		return nil, false, err
	}
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, false, fmt.Errorf("listing journals of writes in flight: %w", err)
	}
	complete = true
	served := j.mem.servedAs(last)
	var errs []error
	for _, e := range entries {
		path := filepath.Join(j.dir, e.Name())
		if strings.HasSuffix(e.Name(), newSuffix) && stale(e) {
			j.discard(path)
		}
		if !strings.HasSuffix(e.Name(), suffix) || path == j.path {
			continue
		}
		other, err := open(path, boot)
		if errors.Is(err, errOtherBoot) {
			err = os.Remove(path)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // retired meanwhile
		case err != nil:
			complete = false
			errs = append(errs, fmt.Errorf("reading journal %s: %w", path, err))
			j.discard(path)
		case other != nil:
			served = served || other.mem.servedAs(last)
			complete = complete && other.mem.overflow().Load() == 0
			pods = append(pods, other.pods()...)
			go other.watch()
		}
	}
	return pods, complete && served, errors.Join(errs...)
}

// stale reports whether the agent that creates this file should have finished.
func stale(e fs.DirEntry) bool {
	info, err := e.Info()
	return err == nil && time.Since(info.ModTime()) > time.Minute
}

// discard lets Serving remove a file that cannot be read, if its agent has exited.
func (j *Journal) discard(path string) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	if free, err := tryLock(f); err == nil && free {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.discarded = append(j.discarded, path)
	}
}

// earlier is the journal of another agent, which runs or has exited.
type earlier struct {
	file   *os.File
	path   string
	mem    mapped
	exited bool
	// waiting has the slots whose writes are not over.
	waiting map[int]chan struct{}
}

func open(path, boot string) (_ *earlier, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	mem, err := mapFile(f)
	if err != nil {
		return nil, err
	}
	if err := mem.check(boot); err != nil {
		mem.unmap()
		return nil, err
	}
	return &earlier{file: f, path: path, mem: mem, waiting: map[int]chan struct{}{}}, nil
}

// pods returns what is in the journal now.
func (e *earlier) pods() (pods []Earlier) {
	now := bootTime()
	e.settle(now)
	for i := range slots {
		s := e.mem.slot(i)
		if s.uid() == "" || s.over(now) {
			continue
		}
		e.waiting[i] = make(chan struct{})
		pods = append(pods, Earlier{UID: s.uid(), Over: e.waiting[i]})
	}
	return pods
}

// settle ends the journal of an agent that has exited. Its writes may take effect for as
// long as a write whose end was not seen. The result is in the file, for later agents.
func (e *earlier) settle(now int64) {
	if e.exited {
		return
	}
	free, err := tryLock(e.file)
	if err != nil || !free {
		return // after an error, which is unlikely, nothing is confirmed
	}
	e.exited = true
	for i := range slots {
		s := e.mem.slot(i)
		if s.uid() == "" {
			continue
		}
		if s.open().Load() > 0 {
			extend(s.until(), now+s.unseen().Load())
			s.open().Store(0)
		}
		s.closed().Store(now)
	}
	unlock(e.file)
}

// watch closes the channels in time, and removes the journal when it is not needed any more.
func (e *earlier) watch() {
	for ; !e.exited || len(e.waiting) > 0; time.Sleep(pollInterval) {
		now := bootTime()
		e.settle(now)
		for i, over := range e.waiting {
			if e.mem.slot(i).over(now) {
				close(over)
				delete(e.waiting, i)
			}
		}
	}
	_ = os.Remove(e.path) // or another agent has
	e.mem.unmap()
	_ = e.file.Close()
}
