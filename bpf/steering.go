package bpf

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/descriptor"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Steering steers connections to ports of one pod to the agent's listeners in the pod's
// network namespace. Those from loopback, and from the address that they are made to,
// reach the application. So do all while the port has no listener here or [Inbound.Beat] is
// late. Its methods must not be called concurrently.
type Steering struct {
	inbound   *Inbound
	dir       string
	inode     uint64 // of the network namespace
	listeners *ebpf.Map
	program   *ebpf.Program
	link      link.Link
}

// Family is the family of an IP address.
type Family uint16

// Families.
const (
	IPv4 Family = unix.AF_INET
	IPv6 Family = unix.AF_INET6
)

// Owner stands for a port in [Steering.Set]: the listener at it identifies the process that
// steers the pod. No connections are steered by it.
const Owner uint16 = 0

// Steer attaches to a pod's network namespace. The pins of an earlier process are taken
// over: its listeners stay until [Steering.Set] replaces them.
func (i *Inbound) Steer(uid [16]byte, netns *os.File) (*Steering, error) {
	var st unix.Stat_t
	if err := descriptor.Control(netns, func(fd int) error { return unix.Fstat(fd, &st) }); err != nil {
		return nil, fmt.Errorf("inspecting network namespace: %w", err)
	}
	pins, err := openPins(i.pinDir)
	if err != nil {
		return nil, err
	}
	defer pins.unlock()
	s := &Steering{inbound: i, dir: filepath.Join(i.pinDir, inboundLayout, hex.EncodeToString(uid[:])), inode: st.Ino}
	if err := s.open(netns); err != nil {
		return nil, errors.Join(fmt.Errorf("steering connections to pod: %w", err), s.Close())
	}
	// After this program is in force: the connections have a listener throughout.
	var errs []error
	for _, dir := range pinnedPods(i.pinDir)[uid] {
		if dir != s.dir {
			errs = append(errs, removeLayout(dir))
		}
	}
	return s, errors.Join(errs...)
}

// open attaches by the pinned link if there is one, which replaces the program atomically,
// else by a new link.
func (s *Steering) open(netns *os.File) error {
	// The link of an earlier process, unless it is of another network namespace.
	pinned, err := pinnedLink(filepath.Join(s.dir, linkPin), func(l link.Link) (bool, error) { return netnsOf(l, s.inode) })
	if err != nil {
		return err
	}
	s.link = pinned
	if pinned == nil {
		// What may be left is of another network namespace, with its listeners.
		if err := removeLayout(s.dir); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("creating pin directory: %w", unsupported(err))
	}
	objects, err := s.inbound.load(s.dir)
	if err != nil {
		return err
	}
	s.program, s.listeners = objects.Steer, objects.Listeners
	if pinned != nil {
		return failure.Wrap(pinned.Update(s.program), "replacing program of pinned link")
	}
	err = descriptor.Control(netns, func(fd int) error {
		l, err := link.AttachNetNs(fd, s.program)
		if err == nil {
			s.link = l
		}
		return err
	})
	if err == nil {
		err = s.link.Pin(filepath.Join(s.dir, linkPin))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("attaching to the pod's network namespace: %w", unsupported(err)), removeLayout(s.dir))
	}
	return nil
}

// key is how the program finds the listener for a port.
func key(port uint16, family Family) lookupInbound {
	return lookupInbound{Port: port, Family: uint16(family)}
}

// Set steers connections to a port to a listener of this family, in the pod's network
// namespace. It replaces another listener atomically. There are at most 31 ports.
func (s *Steering) Set(port uint16, family Family, l *net.TCPListener) error {
	return descriptor.Control(l, func(fd int) error {
		return failure.Wrap(s.listeners.Put(key(port, family), uint64(fd)), "steering connections to port %d", port)
	})
}

// Delete ends the steering to a port. It succeeds if there is none.
func (s *Steering) Delete(port uint16, family Family) error {
	return failure.Wrap(deleteKey(s.listeners, key(port, family)), "ending the steering to port %d", port)
}

// Listener returns the cookie (SO_COOKIE) of the listener for a port; 0 if there is none, or
// if it was closed.
func (s *Steering) Listener(port uint16, family Family) (cookie uint64, err error) {
	err = s.listeners.Lookup(key(port, family), &cookie)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, nil
	}
	return cookie, failure.Wrap(err, "looking up the listener for port %d", port)
}

// Ports returns the ports that have listeners of this family.
func (s *Steering) Ports(family Family) ([]uint16, error) {
	var ports []uint16
	var k lookupInbound
	for at := any(nil); ; at = k {
		var next lookupInbound
		err := s.listeners.NextKey(at, &next)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return ports, nil
		}
		if err != nil {
			return nil, fmt.Errorf("listing the ports that are steered: %w", err)
		}
		if k = next; k.Family == uint16(family) && k.Port != Owner {
			ports = append(ports, k.Port)
		}
	}
}

// Check returns an error if the program was detached, or its pins were removed, from
// outside.
func (s *Steering) Check() error {
	attached, err := netnsOf(s.link, s.inode)
	if err == nil && !attached {
		err = errors.New("the steering program is no longer attached to the pod's network namespace")
	}
	for _, name := range []string{linkPin, lookupMapListeners} {
		if _, missing := os.Lstat(filepath.Join(s.dir, name)); missing != nil {
			err = errors.Join(err, fmt.Errorf("looking for a pin: %w", missing))
		}
	}
	return err
}

// Remove detaches from the pod's network namespace and removes the pins.
func (s *Steering) Remove() error {
	pins, err := openPins(s.inbound.pinDir)
	if err != nil {
		return err
	}
	defer pins.unlock()
	err = removeLayout(s.dir)
	if s.link != nil {
		err = errors.Join(err, s.link.Detach())
	}
	return failure.Wrap(err, "ending the steering to pod")
}

// Close closes program and map. The pins stay, and connections are steered to the
// listeners as long as they are open.
func (s *Steering) Close() error {
	var errs []error
	if s.link != nil {
		errs = append(errs, s.link.Close())
	}
	if s.listeners != nil {
		errs = append(errs, s.listeners.Close(), s.program.Close())
	}
	return failure.Wrap(errors.Join(errs...), "closing the steering to pod")
}
