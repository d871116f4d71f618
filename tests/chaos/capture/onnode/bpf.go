package onnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// inventory is the kernel's ids of what is pinned below a directory.
type inventory struct {
	Links    []link.ID
	Programs []ebpf.ProgramID
	Maps     []ebpf.MapID
}

// pinned calls visit for everything that is pinned below dir.
func pinned(dir string, visit func(path string) error) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return visit(path)
	})
}

func takeInventory(dir string) (inv inventory, err error) {
	err = pinned(dir, func(path string) error {
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			defer l.Close()
			info, err := l.Info()
			if err != nil {
				return fmt.Errorf("looking at link %s: %w", path, err)
			}
			inv.Links = append(inv.Links, info.ID)
			inv.Programs = append(inv.Programs, info.Program)
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("%s is neither a link nor a map: %w", path, err)
		}
		defer m.Close()
		info, err := m.Info()
		if err != nil {
			return fmt.Errorf("looking at map %s: %w", path, err)
		}
		if id, ok := info.ID(); ok {
			inv.Maps = append(inv.Maps, id)
		}
		return nil
	})
	return inv, err
}

// detach takes the program of every pinned link off its hook, as another privileged process
// could.
func detach(dir string) error {
	n := 0
	err := pinned(dir, func(path string) error {
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return nil // a map
		}
		defer l.Close()
		if err := l.Detach(); err != nil {
			return fmt.Errorf("detaching %s: %w", path, err)
		}
		n++
		return nil
	})
	if err == nil && n == 0 {
		err = errors.New("no link is pinned in " + dir)
	}
	return err
}

// empty deletes all entries of the pinned maps of the given names.
func empty(dir string, names []string) error {
	n := 0
	err := pinned(dir, func(path string) error {
		if !slices.Contains(names, filepath.Base(path)) {
			return nil
		}
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err != nil {
			return fmt.Errorf("opening map %s: %w", path, err)
		}
		defer m.Close()
		for {
			key, err := m.NextKeyBytes(nil)
			if err != nil {
				return fmt.Errorf("reading map %s: %w", path, err)
			}
			if key == nil {
				return nil
			}
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("emptying map %s: %w", path, err)
			}
			n++
		}
	})
	if err == nil && n == 0 {
		err = fmt.Errorf("no entries in %v", names)
	}
	return err
}

// printLeft prints what remains of an inventory, and what is attached to a cgroup.
func printLeft(cgroup, text string) error {
	var inv inventory
	if err := json.Unmarshal([]byte(text), &inv); err != nil {
		return fmt.Errorf("reading the inventory: %w", err)
	}
	for _, id := range inv.Links {
		if l, err := link.NewFromID(id); err == nil {
			fmt.Println("link", id)
			_ = l.Close()
		}
	}
	for _, id := range inv.Programs {
		if p, err := ebpf.NewProgramFromID(id); err == nil {
			fmt.Println("program", id, p)
			_ = p.Close()
		}
	}
	for _, id := range inv.Maps {
		if m, err := ebpf.NewMapFromID(id); err == nil {
			fmt.Println("map", id, m)
			_ = m.Close()
		}
	}
	root, err := os.Open(cgroup)
	if err != nil {
		return fmt.Errorf("opening the cgroup: %w", err)
	}
	defer root.Close()
	for _, attach := range []ebpf.AttachType{
		ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect, ebpf.AttachCgroupInet4GetPeername,
		ebpf.AttachCgroupInet6GetPeername, ebpf.AttachCGroupSockOps, ebpf.AttachCgroupInetSockRelease,
	} {
		programs, err := link.QueryPrograms(link.QueryOptions{Target: int(root.Fd()), Attach: attach})
		if err != nil {
			return fmt.Errorf("asking what is attached to %s: %w", cgroup, err)
		}
		for _, p := range programs.Programs {
			fmt.Println("attached", attach, p.ID)
		}
	}
	return nil
}
