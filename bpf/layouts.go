package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// layout is the name of the directory of the pins. It changes whenever a map's key,
// value or meaning does, so that no program uses a map of another layout.
//
// Agents of two layouts may run on a node at once. Every layout must therefore keep
// this: the maps "pods" and "cgroups" have keys of 8 bytes and values that begin with
// the pod's uid, all zero for entries other than pods; and "agent_sockets" never
// changes, because all layouts share it.
const layout = "v3"

// layouts is the pattern of the names of layouts' directories.
const layouts = "v[0-9]*"

// table is the pods of a layout.
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
				return tables, fmt.Errorf("opening the redirection of another version: %w", unsupported(err))
			}
			t.maps = append(t.maps, m)
		}
	}
	return tables, nil
}

// shareAgentSockets pins the map of another layout in this one too, unless this one has
// its own. The programs of both then exempt the sockets of both agents.
func (p *pins) shareAgentSockets(spec *ebpf.MapSpec) error {
	path := filepath.Join(p.dir, redirectMapAgentSockets)
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	found, _ := filepath.Glob(filepath.Join(p.parent, layouts, redirectMapAgentSockets))
	for _, other := range found {
		m, err := ebpf.LoadPinnedMap(other, nil)
		if err != nil {
			return fmt.Errorf("opening the redirection of another version: %w", unsupported(err))
		}
		defer m.Close()
		if spec.Compatible(m) != nil {
			continue
		}
		second, err := m.Clone() // pinning m itself would move its pin
		if err != nil {
			return fmt.Errorf("sharing %s: %w", other, err)
		}
		defer second.Close()
		return failure.Wrap(unsupported(second.Pin(path)), "sharing %s", other)
	}
	return nil
}

// delete removes a pod. It succeeds if there is none.
func (t *table) delete(k Key) error {
	if k.by >= len(t.maps) {
		return nil
	}
	return failure.Wrap(deleteKey(t.maps[k.by], k.id), "ending redirection of pod with %s", k)
}

// sweep removes the pods for which keep is false, and returns how many are left.
func (t *table) sweep(keep func(uid [16]byte) bool) (left int, err error) {
	for _, m := range t.maps {
		err := deleteMatching(m, func(_ uint64, value []byte) bool {
			uid := [16]byte(value)
			if uid == [16]byte{} || !keep(uid) {
				return uid != [16]byte{}
			}
			left++
			return false
		})
		if err != nil {
			return left, fmt.Errorf("ending the redirection of deleted pods: %w", err)
		}
	}
	return left, nil
}

func (t *table) close() error {
	errs := collect.Map(t.maps, func(m *ebpf.Map) error { return m.Close() })
	return errors.Join(errs...)
}

// retire removes the layout.
func (t *table) retire() error {
	pins, err := openPins(filepath.Dir(t.dir))
	if err != nil {
		return err
	}
	defer pins.unlock()
	return removeLayout(t.dir)
}

// removeLayout detaches the links pinned in a layout's directory and unpins everything.
func removeLayout(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading pin directory: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		// If this fails, it is a map. Unpinning detaches too, unless a process has the link open.
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			if err := l.Detach(); err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
				errs = append(errs, fmt.Errorf("detaching %s: %w", path, err))
			}
			l.Close()
		}
		if err := os.Remove(path); err != nil {
			errs = append(errs, fmt.Errorf("unpinning: %w", err))
		}
	}
	if err := os.Remove(dir); err != nil {
		errs = append(errs, fmt.Errorf("removing pin directory: %w", err))
	}
	return errors.Join(errs...)
}

// Forget ends the redirection of the pod whose network namespace has this cookie, for a
// process that does not redirect by BPF itself. It succeeds if nothing is pinned under
// pinDir.
func Forget(pinDir string, cookie uint64) error {
	pinned, _ := filepath.Glob(filepath.Join(pinDir, layouts, redirectMapPods))
	for _, path := range pinned {
		pods, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("opening pinned map of pods: %w", unsupported(err))
		}
		t := &table{maps: []*ebpf.Map{pods}}
		if err := errors.Join(t.delete(ByCookie(cookie)), t.close()); err != nil {
			return err
		}
	}
	return nil
}

// Remove detaches and unpins all that [Open] and [Inbound.Steer] pinned under pinDir, of all versions and for
// all processes. It succeeds if nothing is there.
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
	errs := collect.Map(dirs, removeLayout)
	errs = append(errs, removeInbound(pinDir))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_ = os.Remove(pinDir) // fails if it contains anything else
	return nil
}
