package journal

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

const (
	suffix    = ".journal"
	newSuffix = ".new"

	// reuseAfter is how long the slot of a closed pod stays its own: a request of it may
	// be about to begin a write, and finds only then that it must not.
	reuseAfter = time.Minute
)

// Journal is the journal of this agent.
type Journal struct {
	dir  string
	path string
	file *os.File // whose lock shows that this process lives; nil: in memory

	mu  sync.Mutex
	mem mapped
	// discarded are unreadable files of dead agents.
	discarded []string
}

// Create makes the journal of this agent in dir.
func Create(dir string) (*Journal, error) {
	j, err := create(dir)
	if err != nil {
		return nil, fmt.Errorf("creating the journal of writes in flight: %w", err)
	}
	return j, nil
}

// InMemory returns a journal for an agent that cannot create one in dir. The next agent
// notices that this one kept none.
func InMemory(dir string) *Journal { return &Journal{dir: dir, mem: make(mapped, fileSize)} }

// Outlives reports whether the next agent can read the journal.
func (j *Journal) Outlives() bool { return j.file != nil }

func create(dir string) (_ *Journal, err error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, "*"+newSuffix)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if _, err := tryLock(f); err != nil { // before others see the file
		return nil, err
	}
	// Written, not extended: a page that the file system has no room for would kill
	// the process when it is touched.
	if _, err := f.Write(append(header(boot), make([]byte, fileSize-size)...)); err != nil {
		return nil, err
	}
	j := &Journal{dir: dir, file: f, path: strings.TrimSuffix(f.Name(), newSuffix) + suffix}
	// A mapping keeps the lock of the file that it was made from.
	other, err := os.OpenFile(f.Name(), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = other.Close() }()
	if j.mem, err = mapFile(other); err != nil {
		return nil, err
	}
	return j, os.Rename(f.Name(), j.path)
}

// Serving notes that this agent serves once the given takeover socket is in place, and
// that all which is in flight from then on is in the journals, that of agents whose
// journals could not be read included. An agent without a journal puts another socket
// there.
func (j *Journal) Serving(socket [2]int64) {
	j.mem.setSocket(socket)
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, path := range j.discarded {
		_ = os.Remove(path) // or the next agent does
	}
	j.discarded = nil
}

// Pod records the writes of one pod. Its methods are safe for concurrent use, take no
// lock and make no system call, but for Lose.
type Pod struct{ slot slot }

// Pod returns a new record. If there is no room, the next agent takes all pods for ones
// of which nothing is known.
func (j *Journal) Pod(uid string) *Pod {
	j.mu.Lock()
	defer j.mu.Unlock()
	now := bootTime()
	for i := 0; i < slots && len(uid) <= maxUID; i++ {
		s := j.mem.slot(i)
		if s.uid() == "" || s.over(now) && now-s.closed().Load() > int64(reuseAfter) {
			clear(s)
			copy(s, uid)
			return &Pod{s}
		}
	}
	j.mem.overflow().Store(1)
	return &Pod{make(slot, size)}
}

// Begin counts a write before it leaves.
func (p *Pod) Begin() { p.slot.open().Add(1) }

// End uncounts a write that takes effect no more.
func (p *Pod) End() { p.slot.open().Add(-1) }

// Lose uncounts a write that may take effect for a while yet.
func (p *Pod) Lose(left time.Duration) {
	extend(p.slot.until(), bootTime()+int64(left))
	p.End()
}

// Unseen sets how long a write goes on when its end was not seen. It never shrinks: it
// holds for writes that began before as well.
func (p *Pod) Unseen(d time.Duration) { extend(p.slot.unseen(), int64(d)) }

// Close notes that no more writes begin.
func (p *Pod) Close() { p.slot.closed().Store(bootTime()) }

// Retire removes the file, if no write is left that it is about: another agent serves,
// which keeps a journal of its own.
func (j *Journal) Retire() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.Outlives() {
		return nil
	}
	now := bootTime()
	for i := range slots {
		if s := j.mem.slot(i); s.uid() != "" && !s.over(now) {
			return nil
		}
	}
	if err := os.Remove(j.path); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("removing the journal of writes in flight: %w", err)
	}
	return nil
}

// Abandon gives up the lock, as the end of the process does. Nothing is removed.
func (j *Journal) Abandon() {
	if j.Outlives() {
		_ = j.file.Close()
	}
}

// base is the file's name in its folder.
func (j *Journal) base() string { return filepath.Base(j.path) }
