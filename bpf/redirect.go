package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
)

// Redirect is the redirection of this node. It is safe for concurrent use, and
// several processes may hold it at once: they share the pinned maps.
type Redirect struct {
	maps redirectMaps
}

// Open loads the redirection and attaches it to cgroupRoot, the root of the
// unified cgroup hierarchy: only sockets made below it are seen. Maps and links
// are pinned under pinDir, in a directory named for their layout; pinDir itself
// is made if need be and must be on a bpffs.
//
// Where an earlier process left its pins, they are taken over: the maps stay as
// they are, and the programs are replaced without a moment without one.
//
// The error is an [ErrUnsupported] where this node does not allow it, and an
// [ErrHookOwned] where another program keeps the hooks to itself. It leaves
// nothing behind that was not there before.
func Open(cgroupRoot, pinDir string) (r *Redirect, err error) {
	if err := checkCgroup(cgroupRoot); err != nil {
		return nil, err
	}
	pins, err := openPins(pinDir)
	if err != nil {
		return nil, err
	}
	defer pins.unlock()
	defer func() {
		if err != nil && pins.fresh {
			err = errors.Join(err, pins.remove())
		}
	}()

	// Only kernels before 5.11 count BPF memory against the limit; there, loading tells.
	_ = rlimit.RemoveMemlock()

	var objects redirectObjects
	if err := loadRedirectObjects(&objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: pins.dir}}); err != nil {
		return nil, fmt.Errorf("load redirection: %w", unsupported(err))
	}
	// The links hold the programs, the pins hold the links.
	defer objects.redirectPrograms.Close()

	for _, hook := range []struct {
		name    string
		attach  ebpf.AttachType
		program *ebpf.Program
	}{
		{"connect4", ebpf.AttachCGroupInet4Connect, objects.Connect4},
		{"connect6", ebpf.AttachCGroupInet6Connect, objects.Connect6},
	} {
		if err := pins.attach(cgroupRoot, hook.name, hook.attach, hook.program); err != nil {
			return nil, errors.Join(fmt.Errorf("attach %s to %s: %w", hook.name, cgroupRoot, err), objects.redirectMaps.Close())
		}
	}
	return &Redirect{maps: objects.redirectMaps}, nil
}

// Close lets go of the redirection. The pins stay: it goes on without this process.
func (r *Redirect) Close() error {
	if err := r.maps.Close(); err != nil {
		return fmt.Errorf("close redirection: %w", err)
	}
	return nil
}

// Forget ends the redirection of one pod, by the cookie of its network
// namespace, for a process that does not redirect by BPF itself. It is no error
// if nothing is pinned under pinDir.
func Forget(pinDir string, cookie uint64) error {
	pods, err := ebpf.LoadPinnedMap(filepath.Join(pinDir, layout, redirectMapPods), nil)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("open pinned map of pods: %w", unsupported(err))
	}
	defer pods.Close()
	return (&Redirect{maps: redirectMaps{Pods: pods}}).DeletePod(cookie)
}

// Remove detaches and unpins all that [Open] pinned under pinDir, at once and
// for every process. It is no error if nothing is there.
func Remove(pinDir string) error {
	if _, err := os.Stat(pinDir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	pins, err := openPins(pinDir)
	if err != nil {
		return err
	}
	defer pins.unlock()
	if err := pins.remove(); err != nil {
		return err
	}
	_ = os.Remove(pinDir) // unless others keep something there
	return nil
}
