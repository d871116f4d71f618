package bpf

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// inboundLayout is the name of the directory of the pins of all [Steering]s. It changes
// whenever a map's key, value or meaning does.
const inboundLayout = "inbound_v1"

// inboundLayouts is the pattern of the names of such directories.
const inboundLayouts = "inbound_v[0-9]*"

// The names of a Steering's pins. That of the map is its own.
const linkPin = "link"

// Inbound steers connections from outside to pods of this node. It is safe for concurrent
// use. Several processes may open it at once. It shares the heartbeat with [Redirect], and
// needs no cgroup.
type Inbound struct {
	pinDir    string
	heartbeat *ebpf.Map

	mu   sync.Mutex // of beat
	beat *heartbeat
}

// OpenInbound opens what the pods share. It creates pinDir, which must be on a bpffs and
// be that of [Open]. The error is an [ErrUnsupported] if this node cannot steer
// connections: the kernel must be 5.9 or later.
func OpenInbound(pinDir string) (*Inbound, error) {
	for what, err := range map[string]error{
		"programs that look up sockets (sk_lookup)": features.HaveProgramType(ebpf.SkLookup),
		"maps of sockets (sockhash)":                features.HaveMapType(ebpf.SockHash),
	} {
		if err != nil {
			return nil, fmt.Errorf("this kernel has no %s, which requires Linux 5.9: %w", what, unsupported(err))
		}
	}
	pins, err := openPins(pinDir)
	if err != nil {
		return nil, err
	}
	defer pins.unlock()
	_ = rlimit.RemoveMemlock() // as Open does
	spec, err := loadLookup()
	if err != nil {
		return nil, fmt.Errorf("reading the steering program: %w", err)
	}
	var shared struct {
		Heartbeat *ebpf.Map `ebpf:"heartbeat"`
	}
	if err := spec.LoadAndAssign(&shared, pins.options()); err != nil {
		return nil, fmt.Errorf("opening the heartbeat: %w", unsupported(err))
	}
	i := &Inbound{pinDir: pinDir, heartbeat: shared.Heartbeat}
	if i.beat, err = newHeartbeat(i.heartbeat); err != nil {
		return nil, errors.Join(err, i.Close())
	}
	objects, err := i.load("") // with a map that is not pinned
	if err == nil {
		err = objects.Close()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("trying to steer connections: %w", err), i.Close())
	}
	return i, nil
}

// lookup is the program of one pod, and its map.
type lookup struct {
	Steer     *ebpf.Program `ebpf:"steer"`
	Listeners *ebpf.Map     `ebpf:"listeners"`
}

func (l *lookup) Close() error { return errors.Join(l.Steer.Close(), l.Listeners.Close()) }

// load loads the program and the map that is pinned in dir, or a new one. Without dir it
// is not pinned.
func (i *Inbound) load(dir string) (*lookup, error) {
	spec, err := loadLookup()
	if err != nil {
		return nil, fmt.Errorf("reading the steering program: %w", err)
	}
	if dir == "" {
		spec.Maps[lookupMapListeners].Pinning = ebpf.PinNone
	}
	options := &ebpf.CollectionOptions{
		Maps:            ebpf.MapOptions{PinPath: dir},
		MapReplacements: map[string]*ebpf.Map{lookupMapHeartbeat: i.heartbeat},
	}
	objects := &lookup{}
	if err := spec.LoadAndAssign(objects, options); err != nil {
		return nil, fmt.Errorf("loading the steering program: %w", unsupported(err))
	}
	return objects, nil
}

// Beat is the agent's heartbeat, that of [Redirect.Beat], and reports the same. While the last
// beat is more than two seconds old, all connections reach the applications.
func (i *Inbound) Beat() (lapsed bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.beat.beat()
}

// Sweep ends the steering of the pods for which keep is false, in other layouts too. Call
// it in a process that steers all pods of the node.
func (i *Inbound) Sweep(keep func(uid [16]byte) bool) error {
	pins, err := openPins(i.pinDir)
	if err != nil {
		return err
	}
	defer pins.unlock()
	return failure.Wrap(unpinPods(i.pinDir, keep), "ending the steering to deleted pods")
}

// unpinPods removes the pins of the pods for which keep is false.
func unpinPods(pinDir string, keep func(uid [16]byte) bool) error {
	var errs []error
	for uid, dirs := range pinnedPods(pinDir) {
		if !keep(uid) {
			errs = append(errs, collect.Map(dirs, removeLayout)...)
		}
	}
	return errors.Join(errs...)
}

// pinnedPods returns the directories of the pods' pins, in all layouts.
func pinnedPods(pinDir string) map[[16]byte][]string {
	pods := map[[16]byte][]string{}
	dirs, _ := filepath.Glob(filepath.Join(pinDir, inboundLayouts, "*"))
	for _, dir := range dirs {
		uid, err := hex.DecodeString(filepath.Base(dir))
		if err == nil && len(uid) == 16 {
			pods[[16]byte(uid)] = append(pods[[16]byte(uid)], dir)
		}
	}
	return pods
}

// removeInbound removes the pins of all Steerings.
func removeInbound(pinDir string) error {
	errs := []error{unpinPods(pinDir, func([16]byte) bool { return false })}
	layouts, _ := filepath.Glob(filepath.Join(pinDir, inboundLayouts))
	for _, dir := range layouts {
		if err := os.Remove(dir); err != nil {
			errs = append(errs, fmt.Errorf("removing pin directory: %w", err))
		}
	}
	return errors.Join(errs...)
}

// Close closes what the pods share. Their steering continues.
func (i *Inbound) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return failure.Wrap(errors.Join(i.beat.close(), i.heartbeat.Close()), "closing the heartbeat")
}

// netnsOf reports whether l is attached to the network namespace with this inode.
func netnsOf(l link.Link, inode uint64) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, fmt.Errorf("inspecting link: %w", err)
	}
	its := info.NetNs()
	return its != nil && uint64(its.NetnsInode) == inode, nil
}
