package bpf

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
)

// Redirect is the redirection of this node. It is safe for concurrent use, and
// several processes may hold it at once: they share the pinned maps.
type Redirect struct {
	cgroupRoot, pinDir string

	maps   redirectMaps
	beat   *heartbeat
	others []*table // of other layouts
	lacks  map[lack]error

	// sweptSlots is true while there is no slot known to be cleared.
	sweptSlots atomic.Bool

	taking sync.RWMutex // of origins, against closing their map
	closed bool         // under taking

	mu    sync.Mutex // of hooks' links
	hooks []*hook
}

// lack is something that can be done without.
type lack string

const (
	lackOfLookUp   lack = "whether an agent listens is not asked, only its heartbeat"
	lackOfCgroups  lack = "pods that use the node's network cannot be told apart"
	lackOfPeerName lack = "clients see a redirected connection's peer as 127.0.0.1 or ::1"
	lackOfEgress   lack = "connections to others than the apiserver cannot be redirected"
)

// Open loads the redirection and attaches it to cgroupRoot, the root of the
// unified cgroup hierarchy: only sockets made below it are seen. Maps and links
// are pinned under pinDir, in a directory named for their layout; pinDir itself
// is made if need be and must be on a bpffs.
//
// Where an earlier process left its pins, they are taken over: the maps stay as
// they are, and the programs are replaced without a moment without one. Where
// that process was of another version, with another layout, both redirections
// are in force: a pod moves from the one to the other by [Redirect.SetPod], and
// [Redirect.Sweep] removes the other one when no pod is left in it.
//
// The error is an [ErrUnsupported] where this node does not allow it, and an
// [ErrHookOwned] where another program keeps the hooks to itself. It leaves
// nothing behind that was not there before.
func Open(cgroupRoot, pinDir string) (_ *Redirect, err error) {
	if err := checkCgroup(cgroupRoot); err != nil {
		return nil, err
	}
	pins, err := openPins(pinDir)
	if err != nil {
		return nil, err
	}
	defer pins.unlock()
	r := &Redirect{cgroupRoot: cgroupRoot, pinDir: pinDir, lacks: map[lack]error{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
			if pins.fresh {
				err = errors.Join(err, removeLayout(pins.dir))
			}
		}
	}()

	// Only kernels before 5.11 count BPF memory against the limit; there, loading tells.
	_ = rlimit.RemoveMemlock()

	spec, err := loadRedirect()
	if err != nil {
		return nil, fmt.Errorf("read the redirection's programs: %w", err)
	}
	if r.others, err = pins.openOthers(); err != nil {
		return nil, err
	}
	if err := pins.shareAgentSockets(spec.Maps[redirectMapAgentSockets]); err != nil {
		return nil, err
	}
	if err := r.attach(spec, pins); err != nil {
		return nil, err
	}
	if r.beat, err = newHeartbeat(r.maps.Heartbeat); err != nil {
		return nil, err
	}
	return r, nil
}

// attach loads the programs and maps and attaches the programs: those at the connect, and
// the optional ones where the kernel allows it.
func (r *Redirect) attach(spec *ebpf.CollectionSpec, pins *pins) error {
	options := &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: pins.dir}}
	if err := r.attachPeerNames(spec, options, pins); err != nil {
		r.lacks[lackOfPeerName] = err
	}
	if err := r.adjust(spec); err != nil {
		return err
	}
	if err := r.attachConnect(spec, options, pins); err != nil {
		return err
	}
	if err := r.attachEgress(spec, options, pins); err != nil {
		r.lacks[lackOfEgress] = err
	}
	return nil
}

// attachConnect loads the maps and attaches the programs that redirect connects.
func (r *Redirect) attachConnect(spec *ebpf.CollectionSpec, options *ebpf.CollectionOptions, pins *pins) error {
	var objects struct {
		redirectMaps
		Connect4 *ebpf.Program `ebpf:"connect4"`
		Connect6 *ebpf.Program `ebpf:"connect6"`
	}
	if err := spec.LoadAndAssign(&objects, options); err != nil {
		return fmt.Errorf("load redirection: %w", unsupported(err))
	}
	r.maps = objects.redirectMaps
	hooks := []*hook{
		{name: redirectProgConnect4, attach: ebpf.AttachCGroupInet4Connect, program: objects.Connect4},
		{name: redirectProgConnect6, attach: ebpf.AttachCGroupInet6Connect, program: objects.Connect6},
	}
	r.hooks = append(r.hooks, hooks...)
	for _, h := range hooks {
		if err := pins.takeOver(h, r.cgroupRoot); err != nil {
			return fmt.Errorf("attach %s to %s: %w", h.name, r.cgroupRoot, err)
		}
	}
	return nil
}

// attachPeerNames attaches the programs that show clients the address they dialled.
func (r *Redirect) attachPeerNames(spec *ebpf.CollectionSpec, options *ebpf.CollectionOptions, pins *pins) error {
	var programs struct {
		Getpeername4 *ebpf.Program `ebpf:"getpeername4"`
		Getpeername6 *ebpf.Program `ebpf:"getpeername6"`
	}
	if err := spec.LoadAndAssign(&programs, options); err != nil {
		return err
	}
	return r.attachOptional(pins,
		&hook{name: redirectProgGetpeername4, attach: ebpf.AttachCgroupInet4GetPeername, program: programs.Getpeername4},
		&hook{name: redirectProgGetpeername6, attach: ebpf.AttachCgroupInet6GetPeername, program: programs.Getpeername6},
	)
}

// attachEgress attaches the programs that redirection to others than the apiserver
// takes beside those at the connect.
func (r *Redirect) attachEgress(spec *ebpf.CollectionSpec, options *ebpf.CollectionOptions, pins *pins) error {
	var programs struct {
		SetOut   *ebpf.Program `ebpf:"set_out"`
		Sendmsg4 *ebpf.Program `ebpf:"sendmsg4"`
		Sendmsg6 *ebpf.Program `ebpf:"sendmsg6"`
	}
	if err := spec.LoadAndAssign(&programs, options); err != nil {
		return err
	}
	return r.attachOptional(pins,
		&hook{name: redirectProgSetOut, attach: ebpf.AttachCGroupSockOps, program: programs.SetOut},
		&hook{name: redirectProgSendmsg4, attach: ebpf.AttachCGroupUDP4Sendmsg, program: programs.Sendmsg4},
		&hook{name: redirectProgSendmsg6, attach: ebpf.AttachCGroupUDP6Sendmsg, program: programs.Sendmsg6},
	)
}

// attachOptional attaches all of the hooks or none.
func (r *Redirect) attachOptional(pins *pins, hooks ...*hook) error {
	for _, h := range hooks {
		if err := pins.takeOver(h, r.cgroupRoot); err != nil {
			for _, h := range hooks {
				err = errors.Join(err, h.detach(), h.close())
			}
			return err
		}
	}
	r.hooks = append(r.hooks, hooks...)
	return nil
}

// adjust tells the programs what this kernel can do.
func (r *Redirect) adjust(spec *ebpf.CollectionSpec) error {
	have := func(helpers ...asm.BuiltinFunc) (err error) {
		for _, h := range helpers {
			err = errors.Join(err, features.HaveProgramHelper(ebpf.CGroupSockAddr, h))
		}
		return err
	}
	if err := have(asm.FnSkLookupTcp, asm.FnSkRelease); err != nil {
		r.lacks[lackOfLookUp] = err
	}
	if err := have(asm.FnGetCurrentCgroupId, asm.FnGetCurrentAncestorCgroupId); err != nil {
		r.lacks[lackOfCgroups] = err
	}
	for variable, l := range map[string]lack{
		redirectVarCanLookUp: lackOfLookUp, redirectVarCanTellCgroups: lackOfCgroups, redirectVarCanShowPeer: lackOfPeerName,
	} {
		if err := spec.Variables[variable].Set(r.lacks[l] == nil); err != nil {
			return fmt.Errorf("adjust the redirection's programs: %w", err)
		}
	}
	return nil
}

// Lacks is what this node does without, and why: nothing on a kernel of today.
func (r *Redirect) Lacks() []error {
	var lacks []error
	for _, l := range []lack{lackOfLookUp, lackOfCgroups, lackOfPeerName, lackOfEgress} {
		if err := r.lacks[l]; err != nil {
			lacks = append(lacks, fmt.Errorf("%s: %w", l, err))
		}
	}
	return lacks
}

// HostNetwork is nil if pods can be told apart by their cgroups, else the
// reason, which is an [ErrUnsupported].
func (r *Redirect) HostNetwork() error {
	if err := r.lacks[lackOfCgroups]; err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnsupported, lackOfCgroups, err)
	}
	return nil
}

// Egress is nil if connections to others than the apiserver can be redirected, else
// the reason, which is an [ErrUnsupported].
func (r *Redirect) Egress() error {
	if err := r.lacks[lackOfEgress]; err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnsupported, lackOfEgress, err)
	}
	return nil
}

// Beat is a sign of life. The pods that are Open are redirected only while the
// last one is not older than two seconds. It tells whether there was a time, since
// the last by this process or since [Open], when the last by any was older: they
// may have gone direct.
func (r *Redirect) Beat() (lapsed bool) { return r.beat.beat() }

// Check returns what is wrong with the redirection from outside: a hook that
// somebody detached, a pin that somebody removed. It says nothing of entries.
func (r *Redirect) Check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, h := range r.hooks {
		errs = append(errs, h.check(r.cgroupRoot))
	}
	errs = append(errs, checkBPFFS(r.pinDir))
	dir := filepath.Join(r.pinDir, layout)
	var gone []string
	for name := range r.pinned() {
		if !isPinned(dir, name) {
			gone = append(gone, name)
		}
	}
	if len(gone) > 0 {
		slices.Sort(gone)
		errs = append(errs, fmt.Errorf("not pinned in %s any more: %s", dir, strings.Join(gone, ", ")))
	}
	return errors.Join(errs...)
}

// Repair mends what [Redirect.Check] finds, from what this process holds: the
// same maps, so nothing that was in them is lost. Where another process has
// attached or pinned its own since, that is left as it is.
//
// Without a bpffs to pin to, the hooks are attached nonetheless, and the error
// says so: they then go with the last process that holds them.
func (r *Redirect) Repair() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	pins, err := openPins(r.pinDir)
	if err == nil {
		defer pins.unlock()
	} else {
		err = fmt.Errorf("the redirection lasts no longer than its agent, for it cannot be pinned: %w", err)
	}
	errs := []error{err}
	for _, h := range r.hooks {
		if err := h.mend(pins, r.cgroupRoot); err != nil {
			errs = append(errs, fmt.Errorf("attach %s to %s: %w", h.name, r.cgroupRoot, err))
		}
	}
	if pins != nil {
		for name, o := range r.pinned() {
			if !isPinned(pins.dir, name) {
				errs = append(errs, pins.pin(name, o))
			}
		}
	}
	return errors.Join(errs...)
}

// pinned are the objects that have a pin, by its name.
func (r *Redirect) pinned() map[string]object {
	objects := map[string]object{
		redirectMapAgentSockets:  r.maps.AgentSockets,
		redirectMapCgroups:       r.maps.Cgroups,
		redirectMapDestinations:  r.maps.Destinations,
		redirectMapEgressPorts:   r.maps.EgressPorts,
		redirectMapEgressSlots:   r.maps.EgressSlots,
		redirectMapOrigins:       r.maps.Origins,
		redirectMapOwnAddresses:  r.maps.OwnAddresses,
		redirectMapHeartbeat:     r.maps.Heartbeat,
		redirectMapPods:          r.maps.Pods,
		redirectMapTurnedSockets: r.maps.TurnedSockets,
	}
	for _, h := range r.hooks {
		objects[h.name] = h.link
	}
	return objects
}

// Close lets go of the redirection. The pins stay: it goes on without this process.
func (r *Redirect) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, h := range r.hooks {
		errs = append(errs, h.close())
	}
	for _, t := range r.others {
		errs = append(errs, t.close())
	}
	r.taking.Lock()
	r.closed = true
	errs = append(errs, r.beat.close(), r.maps.Close())
	r.taking.Unlock()
	r.hooks, r.others = nil, nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close redirection: %w", err)
	}
	return nil
}

// Sweep ends the redirection of the pods that keep does not know, those of other
// layouts too, and removes the layouts that have none left. It is for a process
// that redirects all pods by itself from now on.
func (r *Redirect) Sweep(keep func(uid [16]byte) bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	own := &table{maps: []*ebpf.Map{r.maps.Pods, r.maps.Cgroups}}
	if _, err := own.sweep(keep); err != nil {
		return err
	}
	if err := r.sweepEgress(keep); err != nil {
		return err
	}
	var errs []error
	r.others = slices.DeleteFunc(r.others, func(t *table) bool {
		left, err := t.sweep(keep)
		if err == nil && left == 0 {
			err = errors.Join(t.close(), r.retire(t))
			errs = append(errs, err)
			return true
		}
		errs = append(errs, err)
		return false
	})
	return errors.Join(errs...)
}

// retire removes another layout.
func (r *Redirect) retire(t *table) error {
	pins, err := openPins(r.pinDir)
	if err != nil {
		return err
	}
	defer pins.unlock()
	return removeLayout(t.dir)
}
