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

	"github.com/ctrlmesh/ctrlmesh/agent/capture/sockdiag"
)

// maxCgroups bounds the cgroups of one pod that are looked through and known.
const maxCgroups = 4096

// membership decides which connections to a pod's listeners are its own, where every
// process of the node can connect to them: those whose sockets were made in the pod's
// cgroup or below.
type membership struct {
	root   string // of the hierarchy
	cgroup uint64 // the pod's
	netns  *os.File

	mu    sync.Mutex
	dir   string          // of the pod's cgroup; "" until it is found
	known map[uint64]bool // the ids of the pod's cgroups; they are never used again
}

// errForeign means that a connection is of another process than the pod's.
var errForeign = errors.New("the connection was not made in the pod's cgroup")

var errNoCgroups = errors.New("the kernel does not tell the cgroup of a socket: it takes Linux 5.9 with CONFIG_SOCK_CGROUP_DATA")

// check returns an error unless the connection that was accepted is the pod's.
func (m *membership) check(conn net.Conn) error {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return errForeign
	}
	near, far := ends(tcp)
	peer, err := findConnection(m.netns, far, near)
	switch {
	case err != nil:
		return err
	case peer.Cgroup == 0:
		return errNoCgroups
	}
	return m.has(peer.Cgroup)
}

// has returns an error unless a cgroup is the pod's or below.
func (m *membership) has(cgroup uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known[cgroup] {
		return nil
	}
	if m.dir == "" {
		dir, err := cgroupDir(m.root, m.cgroup)
		if err != nil {
			return err
		}
		m.dir = dir
	}
	known, err := cgroupsIn(m.dir)
	if err != nil {
		return err
	}
	if m.known = known; !known[cgroup] {
		return errForeign
	}
	return nil
}

// cgroupDir finds the directory of a cgroup.
func cgroupDir(root string, id uint64) (dir string, err error) {
	err = walkCgroups(root, func(path string, found uint64) error {
		if found != id {
			return nil
		}
		dir = path
		return filepath.SkipAll
	})
	if err == nil && dir == "" {
		err = fmt.Errorf("looking for the pod's cgroup: %w", fs.ErrNotExist)
	}
	return dir, err
}

// cgroupsIn are the ids of the cgroup at dir and of those below.
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
	var below string // of the one that is being walked through
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
	if err != nil {
		return nil, err
	}
	return ids, nil
}

// walkCgroups visits the cgroup at root and those below. Those that are removed
// meanwhile are passed over.
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
			return nil //nolint:nilerr // gone meanwhile
		}
		return visit(path, info.Sys().(*syscall.Stat_t).Ino)
	})
	if err != nil {
		return fmt.Errorf("look for the pod's cgroups: %w", err)
	}
	return nil
}

// findConnection asks the kernel for the socket in netns that has these ends.
func findConnection(netns *os.File, local, remote netip.AddrPort) (found sockdiag.Connection, err error) {
	err = inNetNS(netns, func() (err error) {
		found, err = sockdiag.Find(local, remote)
		return err
	})
	if err == nil && found.Remote.Port() != remote.Port() {
		err = fs.ErrNotExist // what was found listens
	}
	if err != nil {
		return found, fmt.Errorf("ask for a connection: %w", err)
	}
	return found, nil
}

// socketsTellCgroups returns an error if the kernel does not say in which cgroup a
// socket was made.
func socketsTellCgroups() error {
	l, err := listenAt(loopback4, 0)
	if err != nil {
		return fmt.Errorf("asking for the cgroup of a socket: %w", err)
	}
	defer l.Close()
	found, err := sockdiag.Find(netip.AddrPortFrom(loopback4, portOf(l)), netip.AddrPortFrom(loopback4, 0))
	if err != nil {
		return fmt.Errorf("asking for the cgroup of a socket: %w", err)
	}
	if found.Cgroup == 0 {
		return errNoCgroups
	}
	return nil
}
