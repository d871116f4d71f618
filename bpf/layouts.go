package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// layout names the directory of the pins. It changes whenever a map's key,
// value or meaning does, so that no program meets a map of another layout.
//
// Agents of two layouts may run on a node at once. What they know of each other,
// and what every layout must therefore keep: the maps "pods" and "cgroups" have
// keys of 8 bytes and values that begin with the pod's uid, all zero if it is no
// pod's; and "agent_sockets" stays as it is, for all layouts share the one.
const layout = "v3"

// layouts is what the directories of layouts are called.
const layouts = "v[0-9]*"

// table is where a layout keeps pods.
type table struct {
	dir  string
	maps []*ebpf.Map // pods and, in layouts that have it, cgroups
}

// openOthers opens the tables of the other layouts.
func (p *pins) openOthers() ([]*table, error) {
	dirs, _ := filepath.Glob(filepath.Join(p.parent, layouts))
	var tables []*table
	for _, dir := range dirs {
		if dir == p.dir {
			continue
		}
		t := &table{dir: dir}
		tables = append(tables, t)
		for _, name := range []string{redirectMapPods, redirectMapCgroups} {
			m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return tables, fmt.Errorf("open the redirection of another version: %w", unsupported(err))
			}
			t.maps = append(t.maps, m)
		}
	}
	return tables, nil
}

// shareAgentSockets makes the map of another layout this one's too, unless it
// has one: so the programs of both let the sockets of both agents pass.
func (p *pins) shareAgentSockets(spec *ebpf.MapSpec) error {
	path := filepath.Join(p.dir, redirectMapAgentSockets)
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	found, _ := filepath.Glob(filepath.Join(p.parent, layouts, redirectMapAgentSockets))
	for _, other := range found {
		m, err := ebpf.LoadPinnedMap(other, nil)
		if err != nil {
			return fmt.Errorf("open the redirection of another version: %w", unsupported(err))
		}
		defer m.Close()
		if spec.Compatible(m) != nil {
			continue
		}
		second, err := m.Clone() // or else the pin would be moved
		if err != nil {
			return fmt.Errorf("share %s: %w", other, err)
		}
		defer second.Close()
		if err := second.Pin(path); err != nil {
			return fmt.Errorf("share %s: %w", other, unsupported(err))
		}
		return nil
	}
	return nil
}

// delete removes the pod of the n-th map's key.
func (t *table) delete(n int, key uint64) error {
	if n >= len(t.maps) {
		return nil
	}
	if err := t.maps[n].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// sweep removes the pods that keep does not know, and returns how many are left.
func (t *table) sweep(keep func(uid [16]byte) bool) (left int, err error) {
	for _, m := range t.maps {
		var gone []uint64
		var key uint64
		value := make([]byte, m.ValueSize())
		it := m.Iterate()
		for it.Next(&key, &value) {
			uid := [16]byte(value)
			switch {
			case uid == [16]byte{}:
			case keep(uid):
				left++
			default:
				gone = append(gone, key)
			}
		}
		if err := it.Err(); err != nil {
			return left, fmt.Errorf("list redirected pods: %w", err)
		}
		for _, key := range gone {
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return left, fmt.Errorf("end the redirection of a pod that is gone: %w", err)
			}
		}
	}
	return left, nil
}

func (t *table) close() error {
	var errs []error
	for _, m := range t.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// removeLayout detaches the links pinned in a layout's directory and unpins everything.
func removeLayout(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		// Not a link if this fails, but a map. Unpinning detaches too, unless a process still holds the link.
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
				errs = append(errs, fmt.Errorf("detach %s: %w", path, err))
			}
			l.Close()
		}
		if err := os.Remove(path); err != nil {
			errs = append(errs, fmt.Errorf("unpin: %w", err))
		}
	}
	if err := os.Remove(dir); err != nil {
		errs = append(errs, fmt.Errorf("remove pin directory: %w", err))
	}
	return errors.Join(errs...)
}

// Forget ends the redirection of one pod, by the cookie of its network
// namespace, for a process that does not redirect by BPF itself. It is no error
// if nothing is pinned under pinDir.
func Forget(pinDir string, cookie uint64) error {
	pinned, _ := filepath.Glob(filepath.Join(pinDir, layouts, redirectMapPods))
	for _, path := range pinned {
		pods, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("open pinned map of pods: %w", unsupported(err))
		}
		t := &table{maps: []*ebpf.Map{pods}}
		if err := errors.Join(t.delete(0, cookie), t.close()); err != nil {
			return fmt.Errorf("end redirection of pod with netns cookie %d: %w", cookie, err)
		}
	}
	return nil
}

// Remove detaches and unpins all that [Open] pinned under pinDir, of whatever
// version, at once and for every process. It is no error if nothing is there.
func Remove(pinDir string) error {
	if _, err := os.Stat(pinDir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	pins, err := openPins(pinDir)
	if err != nil {
		return err
	}
	defer pins.unlock()
	dirs, _ := filepath.Glob(filepath.Join(pinDir, layouts))
	var errs []error
	for _, dir := range dirs {
		errs = append(errs, removeLayout(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_ = os.Remove(pinDir) // unless others keep something there
	return nil
}
