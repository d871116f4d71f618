package bpf

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"

	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Redirect is the redirection of this node. It is safe for concurrent use. Several
// processes may open it at once: they share the pinned maps.
type Redirect struct {
	cgroupRoot, pinDir string

	maps   redirectMaps
	beat   *heartbeat
	others []*table // of other layouts
	lacks  lacks

	// sweptSlots is true if no slot can have become unused since the last sweep.
	sweptSlots atomic.Bool

	taking sync.RWMutex // lookups of origins, against closing their map
	closed bool         // under taking

	mu    sync.Mutex // of hooks' links
	hooks []*hook
}

// lack describes the effect of a missing optional kernel feature.
type lack string

// lacks are the causes of the lacks of this node.
type lacks map[lack]error

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
	r := &Redirect{cgroupRoot: cgroupRoot, pinDir: pinDir, lacks: lacks{}}
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
	if err := spec.LoadAndAssign(&r.maps, pins.options()); err != nil {
		return fmt.Errorf("loading redirection: %w", unsupported(err))
	}
	// These show clients the address that they dialled.
	r.attachOptional(spec, pins, lackOfPeerName, redirectProgGetpeername4, redirectProgGetpeername6)
	if err := r.adjust(spec); err != nil {
		return err
	}
	connect, err := r.attachHooks(spec, pins, redirectProgConnect4, redirectProgConnect6)
	r.hooks = append(r.hooks, connect...)
	if err != nil {
		return err
	}
	r.attachOptional(spec, pins, lackOfEgress, redirectProgSetOut, redirectProgSendmsg4, redirectProgSendmsg6)
	return nil
}

// attachOptional attaches all of the programs or none: then their effect is lacking.
func (r *Redirect) attachOptional(spec *ebpf.CollectionSpec, pins *pins, effect lack, programs ...string) {
	hooks, err := r.attachHooks(spec, pins, programs...)
	if err == nil {
		r.hooks = append(r.hooks, hooks...)
		return
	}
	for _, h := range hooks {
		err = errors.Join(err, h.detach(), h.close())
	}
	r.lacks[effect] = err
}

// attachHooks loads programs and attaches them. It returns their hooks after an error, too.
func (r *Redirect) attachHooks(spec *ebpf.CollectionSpec, pins *pins, programs ...string) (hooks []*hook, err error) {
	part := *spec
	part.Programs = map[string]*ebpf.ProgramSpec{}
	for _, name := range programs {
		part.Programs[name] = spec.Programs[name]
	}
	loaded, err := ebpf.NewCollectionWithOptions(&part, *pins.options())
	if err != nil {
		return nil, fmt.Errorf("loading redirection: %w", unsupported(err))
	}
	defer loaded.Close()
	for _, name := range programs {
		hooks = append(hooks, &hook{name: name, attach: spec.Programs[name].AttachType, program: loaded.DetachProgram(name)})
	}
	for _, h := range hooks {
		if err := pins.takeOver(h, r.cgroupRoot); err != nil {
			return hooks, fmt.Errorf("attaching %s to %s: %w", h.name, r.cgroupRoot, err)
		}
	}
	return hooks, nil
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
func (r *Redirect) HostNetwork() error { return r.lacks.require(lackOfCgroups) }

// Egress returns nil if connections to hosts other than the apiserver can be redirected,
// else an [ErrUnsupported] with the reason.
func (r *Redirect) Egress() error { return r.lacks.require(lackOfEgress) }

// require returns an [ErrUnsupported] if a feature is missing.
func (all lacks) require(l lack) error {
	if err := all[l]; err != nil {
		return fmt.Errorf("%w: %s: %w", ErrUnsupported, l, err)
	}
	return nil
}

// Beat is the agent's heartbeat. Pods that are Open are redirected only while the last
// beat is at most two seconds old. Beat reports whether the heartbeat of all processes
// lapsed at some time since the last beat of this process, or since [Open]: open pods may
// have gone direct meanwhile.
func (r *Redirect) Beat() (lapsed bool) { return r.beat.beat() }

// Check returns an error for each hook that was detached and each pin that was removed
// from outside. It does not check map entries.
func (r *Redirect) Check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := collect.Map(r.hooks, func(h *hook) error { return h.check(r.cgroupRoot) })
	errs = append(errs, checkBPFFS(r.pinDir))
	if missing := slices.Sorted(maps.Keys(r.unpinned())); len(missing) > 0 {
		errs = append(errs, fmt.Errorf("no longer pinned in %s: %s", filepath.Join(r.pinDir, layout), strings.Join(missing, ", ")))
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
		for name, o := range r.unpinned() {
			errs = append(errs, pins.pin(name, o))
		}
	}
	return errors.Join(errs...)
}

// unpinned returns the objects whose pins are missing, by the pin's name.
func (r *Redirect) unpinned() map[string]object {
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
	pinned, _ := os.ReadDir(filepath.Join(r.pinDir, layout)) // what it does not list is missing
	for _, pin := range pinned {
		delete(objects, pin.Name())
	}
	return objects
}

// Close releases the programs and maps. The pins stay, and the redirection continues.
func (r *Redirect) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := collect.Map(r.hooks, func(h *hook) error { return h.close() })
	for _, t := range r.others {
		errs = append(errs, t.close())
	}
	r.taking.Lock()
	r.closed = true
	errs = append(errs, r.beat.close(), r.maps.Close())
	r.taking.Unlock()
	r.hooks, r.others = nil, nil
	return failure.Wrap(errors.Join(errs...), "closing redirection")
}

// Sweep ends the redirection of the pods for which keep is false, in other layouts too,
// and removes other layouts that have no pods left. Call it in a process that redirects
// all pods of the node.
func (r *Redirect) Sweep(keep func(uid [16]byte) bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.maps.table().sweep(keep); err != nil {
		return err
	}
	if err := r.sweepEgress(keep); err != nil {
		return err
	}
	var errs []error
	r.others = slices.DeleteFunc(r.others, func(t *table) bool {
		left, err := t.sweep(keep)
		unused := err == nil && left == 0
		if unused {
			err = errors.Join(t.close(), t.retire())
		}
		errs = append(errs, err)
		return unused
	})
	return errors.Join(errs...)
}
