package capture

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// maxCgroups bounds the cgroups of one pod that are read and kept.
const maxCgroups = 4096

// identity decides which connections to a pod's listeners are the pod's, where every
// process of the node can connect to them: those whose sockets were created in the pod's
// cgroup or below.
type identity struct {
	root   string // of the hierarchy
	cgroup uint64 // the pod's
	netns  *os.File

	mu    sync.Mutex
	dir   string          // of the pod's cgroup; "" until it is found
	known map[uint64]bool // the ids of the pod's cgroups, which the kernel does not reuse
}

// errForeign means that no process of the pod made a connection.
var errForeign = errors.New("the connection was not made in the pod's cgroup")

// check returns an error unless the accepted connection is the pod's.
func (i *identity) check(conn net.Conn) error {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return errForeign
	}
	local, remote := ends(tcp)
	peer, err := findConnection(i.netns, remote, local)
	switch {
	case err != nil:
		return err
	case peer.Cgroup == 0:
		return sockdiag.ErrNoCgroups
	}
	return i.has(peer.Cgroup)
}

// has returns an error unless a cgroup is the pod's or below.
func (i *identity) has(cgroup uint64) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.known[cgroup] {
		return nil
	}
	if i.dir == "" {
		dir, err := cgroupDir(i.root, i.cgroup)
		if err != nil {
			return err
		}
		i.dir = dir
	}
	known, err := cgroupsIn(i.dir)
	if err != nil {
		return err
	}
	if i.known = known; !known[cgroup] {
		return errForeign
	}
	return nil
}

// cgroupDir returns the directory of a cgroup.
func cgroupDir(root string, id uint64) (dir string, err error) {
	err = walkCgroups(root, func(path string, found uint64) error {
		if found != id {
			return nil
		}
		dir = path
		return filepath.SkipAll
	})
	if err == nil && dir == "" {
		err = fmt.Errorf("finding the pod's cgroup: %w", fs.ErrNotExist)
	}
	return dir, err
}

// cgroupsIn returns the ids of the cgroup at dir and of those below.
func cgroupsIn(dir string) (map[uint64]bool, error) {
	ids := map[uint64]bool{}
	return ids, walkCgroups(dir, func(_ string, id uint64) error {
		if len(ids) == maxCgroups {
			return filepath.SkipAll
		}
		ids[id] = true
		return nil
	})
}

// cgroupsBelow returns the ids of these cgroups and of all below them.
func cgroupsBelow(root string, tops map[uint64]bool) (map[uint64]bool, error) {
	ids := map[uint64]bool{}
	var below string // the path of the one that is being walked
	err := walkCgroups(root, func(path string, id uint64) error {
		inside := below != "" && strings.HasPrefix(path, below)
		if !inside && tops[id] {
			below, inside = path+string(filepath.Separator), true
		}
		if inside {
			ids[id] = true
		}
		return nil
	})
	return ids, err
}

// walkCgroups visits the cgroup at root and those below. It omits those that are removed
// meanwhile.
func walkCgroups(root string, visit func(path string, id uint64) error) error {
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && !entry.IsDir() {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return nil // removed meanwhile
		}
		return visit(path, info.Sys().(*syscall.Stat_t).Ino)
	})
	return failure.Wrap(err, "listing the pod's cgroups")
}

// findConnection asks the kernel for the socket with these ends in a network namespace.
func findConnection(namespace *os.File, local, remote netip.AddrPort) (found sockdiag.Connection, err error) {
	err = netns.Do(namespace, func() (err error) {
		found, err = sockdiag.Find(local, remote)
		return err
	})
	if err == nil && found.Remote.Port() != remote.Port() {
		err = fs.ErrNotExist // it is a listener
	}
	return found, failure.Wrap(err, "finding a connection")
}
