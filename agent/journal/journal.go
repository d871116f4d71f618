package journal

import (
	"os"
	"strings"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

const (
	suffix    = ".journal"
	newSuffix = ".new"

	// reuseAfter is how long the slot of a closed pod is not reused: a request may be about
	// to begin a write, and is refused only then.
	reuseAfter = time.Minute
)

// Journal is the journal of this agent.
type Journal struct {
	dir  string
	path string
	file *os.File // its lock shows that this process runs; nil: in memory

	mu  sync.Mutex
	mem mapped
	// discarded are unreadable files of agents that have exited.
	discarded []string
}

// Create creates the journal of this agent in dir.
func Create(dir string) (*Journal, error) {
	j, err := create(dir)
	return j, failure.Wrap(err, "creating the journal of writes in flight")
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
	// Written, not extended: without room in the file system, access to a page that was not
	// written would kill the process.
	if _, err := f.Write(append(header(boot), make([]byte, fileSize-size)...)); err != nil {
		return nil, err
	}
	j := &Journal{dir: dir, file: f, path: strings.TrimSuffix(f.Name(), newSuffix) + suffix}
	// A mapping keeps the lock of the file that it was created from.
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

// Serving records that this agent serves by the given takeover socket, and that the journals
// have all writes in flight, also those of agents whose journals could not be read. An agent
// without a journal has another socket.
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

// Pod returns a new record. If there is no room, the next agent treats the writes of all
// pods as unknown.
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

// Begin counts a write before it is forwarded.
func (p *Pod) Begin() { p.slot.open().Add(1) }

// End uncounts a write that has ended.
func (p *Pod) End() { p.slot.open().Add(-1) }

// Lose uncounts a write that may take effect within the given time.
func (p *Pod) Lose(left time.Duration) {
	extend(p.slot.until(), bootTime()+int64(left))
	p.End()
}

// Unseen sets how long a write may take effect if its end was not seen. It never shrinks,
// because it applies to earlier writes as well.
func (p *Pod) Unseen(d time.Duration) { extend(p.slot.unseen(), int64(d)) }

// Close records that no more writes begin.
func (p *Pod) Close() { p.slot.closed().Store(bootTime()) }

// Retire removes the file unless it has a write in flight. It is called once another agent
// serves, which keeps a journal of its own.
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
	if err := os.Remove(j.path); !os.IsNotExist(err) {
		return failure.Wrap(err, "removing the journal of writes in flight")
	}
	return nil
}

// Abandon gives up the lock, as the end of the process does. Nothing is removed.
func (j *Journal) Abandon() {
	if j.Outlives() {
		_ = j.file.Close()
	}
}
