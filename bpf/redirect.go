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

// Redirect is the redirection of this node. It is safe for concurrent use. Several
// processes may open it at once: they share the pinned maps.
type Redirect struct {
	cgroupRoot, pinDir string

	maps   redirectMaps
	beat   *heartbeat
	others []*table // of other layouts
	lacks  map[lack]error

	// sweptSlots is true if no slot can have become unused since the last sweep.
	sweptSlots atomic.Bool

	taking sync.RWMutex // lookups of origins, against closing their map
	closed bool         // under taking

	mu    sync.Mutex // of hooks' links
	hooks []*hook
}

// lack describes the effect of a missing optional kernel feature.
type lack string

const (
	lackOfLookUp   lack = "only the heartbeat shows whether an agent listens"
	lackOfCgroups  lack = "pods that use the node's network cannot be distinguished"
	lackOfPeerName lack = "clients see a redirected connection's peer as 127.0.0.1 or ::1"
	lackOfEgress   lack = "connections to hosts other than the apiserver cannot be redirected"
)

// Open loads the redirection and attaches it to cgroupRoot, the root of the
// unified cgroup hierarchy. The programs see only sockets created below it. Maps and
// links are pinned under pinDir, in a directory named after their layout. Open creates
// pinDir if it is missing; it must be on a bpffs.
//
// Open reuses the pins of an earlier process: the maps keep their content, and programs
// are replaced atomically. If that process had another layout, both redirections are in
// force: [Redirect.SetPod] moves a pod from one to the other, and [Redirect.Sweep]
// removes the other one when it has no pods left.
//
// The error is an [ErrUnsupported] if this node does not allow redirection, and an
// [ErrHookOwned] if another program is attached exclusively. Open undoes its changes
// when it fails.
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

	// Only kernels before 5.11 count BPF memory against the limit; there, loading fails.
	_ = rlimit.RemoveMemlock()

	spec, err := loadRedirect()
	if err != nil {
		return nil, fmt.Errorf("reading the redirection's programs: %w", err)
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

// attach loads maps and programs and attaches the programs: those of connect, and the
// optional ones if the kernel supports them.
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
		return fmt.Errorf("loading redirection: %w", unsupported(err))
	}
	r.maps = objects.redirectMaps
	hooks := []*hook{
		{name: redirectProgConnect4, attach: ebpf.AttachCGroupInet4Connect, program: objects.Connect4},
		{name: redirectProgConnect6, attach: ebpf.AttachCGroupInet6Connect, program: objects.Connect6},
	}
	r.hooks = append(r.hooks, hooks...)
	for _, h := range hooks {
		if err := pins.takeOver(h, r.cgroupRoot); err != nil {
			return fmt.Errorf("attaching %s to %s: %w", h.name, r.cgroupRoot, err)
		}
	}
	return nil
}

// attachPeerNames attaches the programs that show clients the address that they dialled.
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

// attachEgress attaches the further programs for connections to hosts other than the apiserver.
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

// adjust sets the constants by which the programs know what this kernel supports.
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
		redirectVarCanLookUp: lackOfLookUp, redirectVarCanSeeCgroups: lackOfCgroups, redirectVarCanShowPeer: lackOfPeerName,
	} {
		if err := spec.Variables[variable].Set(r.lacks[l] == nil); err != nil {
			return fmt.Errorf("configuring the redirection's programs: %w", err)
		}
	}
	return nil
}

// Lacks returns the optional features that this node lacks, each with its effect and cause.
// Current kernels lack none.
func (r *Redirect) Lacks() []error {
	var lacks []error
	for _, l := range []lack{lackOfLookUp, lackOfCgroups, lackOfPeerName, lackOfEgress} {
		if err := r.lacks[l]; err != nil {
			lacks = append(lacks, fmt.Errorf("%s: %w", l, err))
		}
	}
	return lacks
}

// HostNetwork returns nil if the programs can distinguish pods by their cgroups, else an
// [ErrUnsupported] with the reason.
func (r *Redirect) HostNetwork() error {
	if err := r.lacks[lackOfCgroups]; err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnsupported, lackOfCgroups, err)
	}
	return nil
}

// Egress returns nil if connections to hosts other than the apiserver can be redirected,
// else an [ErrUnsupported] with the reason.
func (r *Redirect) Egress() error {
	if err := r.lacks[lackOfEgress]; err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnsupported, lackOfEgress, err)
	}
	return nil
}

// Beat is the agent's heartbeat. Pods that are Open are redirected only while the last
// beat is at most two seconds old. Beat reports whether the heartbeat of all processes
// lapsed at some time since the last beat of this process, or since [Open]: open pods may
// have missing direct meanwhile.
func (r *Redirect) Beat() (lapsed bool) { return r.beat.beat() }

// Check returns an error for each hook that was detached and each pin that was removed
// from outside. It does not check map entries.
func (r *Redirect) Check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, h := range r.hooks {
		errs = append(errs, h.check(r.cgroupRoot))
	}
	errs = append(errs, checkBPFFS(r.pinDir))
	dir := filepath.Join(r.pinDir, layout)
	var missing []string
	for name := range r.pinned() {
		if !isPinned(dir, name) {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		errs = append(errs, fmt.Errorf("no longer pinned in %s: %s", dir, strings.Join(missing, ", ")))
	}
	return errors.Join(errs...)
}

// Repair fixes what [Redirect.Check] finds, with the programs and maps that this process
// has open, so map entries are kept. It does not replace what another process has
// attached or pinned since.
//
// Without a bpffs, Repair attaches the hooks but cannot pin them, and returns an error:
// the hooks then end with the last process that has them open.
func (r *Redirect) Repair() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	pins, err := openPins(r.pinDir)
	if err == nil {
		defer pins.unlock()
	} else {
		err = fmt.Errorf("pinning the redirection, which lasts no longer than its agent until then: %w", err)
	}
	errs := []error{err}
	for _, h := range r.hooks {
		if err := h.repair(pins, r.cgroupRoot); err != nil {
			errs = append(errs, fmt.Errorf("attaching %s to %s: %w", h.name, r.cgroupRoot, err))
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

// pinned returns the objects that have a pin, by the pin's name.
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

// Close releases the programs and maps. The pins stay, and the redirection continues.
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
		return fmt.Errorf("closing redirection: %w", err)
	}
	return nil
}

// Sweep ends the redirection of the pods for which keep is false, in other layouts too,
// and removes other layouts that have no pods left. Call it in a process that redirects
// all pods of the node.
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
