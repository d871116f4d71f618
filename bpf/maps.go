package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Pod is where a captured pod's connections go.
type Pod struct {
	UID  [16]byte // the pod's uid, by which a later process identifies the entry; not all zero
	Port uint16   // of the listener on 127.0.0.1 and ::1 in the pod's network namespace

	// Open lets the pod go direct while nothing listens at Port, while the last
	// [Redirect.Beat] is more than two seconds ago, and while it is Stalled.
	// Without Open, the pod's connections are refused in these cases.
	Open bool
	// Stalled means that the pod's listener accepts no connections.
	Stalled bool

	// Egress is the port of the listener for connections to other hosts, at the ports of
	// [Redirect.SetEgress]; 0 if these go direct.
	Egress uint16
}

// The flags of an entry, as redirect.c has them.
const (
	flagOpen = 1 << iota
	flagHost
	flagStalled
)

func (p Pod) entry() redirectPod {
	entry := redirectPod{Uid: p.UID, Port: p.Port, Egress: p.Egress}
	if p.Open {
		entry.Flags |= flagOpen
	}
	if p.Stalled {
		entry.Flags |= flagStalled
	}
	return entry
}

func (e redirectPod) pod() Pod {
	return Pod{UID: e.Uid, Port: e.Port, Open: e.Flags&flagOpen != 0, Stalled: e.Flags&flagStalled != 0, Egress: e.Egress}
}

// SetDestinations replaces the set of addresses to which connections are redirected.
// Addresses in both sets are redirected throughout; new ones are added before old ones
// are removed. The set has at most 4096 addresses.
func (r *Redirect) SetDestinations(destinations []netip.AddrPort) error {
	wanted := make(map[redirectDestination]bool, len(destinations))
	for _, d := range destinations {
		key := destinationKey(d)
		wanted[key] = true
		if err := r.maps.Destinations.Put(key, uint8(1)); err != nil {
			return fmt.Errorf("adding destination %s: %w", d, err)
		}
	}
	var key redirectDestination
	var one uint8
	var unwanted []redirectDestination
	for it := r.maps.Destinations.Iterate(); ; {
		if !it.Next(&key, &one) {
			if err := it.Err(); err != nil {
				return fmt.Errorf("listing destinations: %w", err)
			}
			break
		}
		if !wanted[key] {
			unwanted = append(unwanted, key)
		}
	}
	for _, key := range unwanted {
		if err := r.maps.Destinations.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("removing destination: %w", err)
		}
	}
	return nil
}

// SetPod redirects the pod whose network namespace has this cookie. It replaces an
// earlier entry atomically, in another layout too: every connect sees one or the other.
// There are at most 16384 entries.
func (r *Redirect) SetPod(cookie uint64, pod Pod) error {
	return r.set(podsByCookie, cookie, pod)
}

// SetCgroup redirects the pod whose cgroup has this id, if it is in a network
// namespace that [Redirect.SetHost] named. It does what [Redirect.SetPod] does
// for pods with a network namespace of their own.
func (r *Redirect) SetCgroup(id uint64, pod Pod) error {
	if err := r.HostNetwork(); err != nil {
		return err
	}
	return r.set(podsByCgroup, id, pod)
}

// SetHost makes the network namespace with this cookie the node's: the programs
// distinguish the pods in it by their cgroups.
func (r *Redirect) SetHost(cookie uint64) error {
	if err := r.maps.Pods.Put(cookie, redirectPod{Flags: flagHost}); err != nil {
		return fmt.Errorf("setting netns cookie %d as the node's: %w", cookie, err)
	}
	return nil
}

// Pod returns the entry of the pod whose network namespace has this cookie, and whether there is one.
func (r *Redirect) Pod(cookie uint64) (Pod, bool, error) { return r.get(podsByCookie, cookie) }

// Cgroup returns the entry of the pod whose cgroup has this id, and whether there is one.
func (r *Redirect) Cgroup(id uint64) (Pod, bool, error) { return r.get(podsByCgroup, id) }

// DeletePod ends the redirection of a pod: its connections go direct. It succeeds if the
// pod was not redirected.
func (r *Redirect) DeletePod(cookie uint64) error { return r.delete(podsByCookie, cookie) }

// DeleteCgroup does what [Redirect.DeletePod] does, for pods identified by their cgroup.
func (r *Redirect) DeleteCgroup(id uint64) error { return r.delete(podsByCgroup, id) }

// How pods are identified; the index of a table's map too.
const (
	podsByCookie = iota
	podsByCgroup
)

func (r *Redirect) podMap(by int) (m *ebpf.Map, what string) {
	if by == podsByCgroup {
		return r.maps.Cgroups, "cgroup"
	}
	return r.maps.Pods, "netns cookie"
}

func (r *Redirect) set(by int, key uint64, pod Pod) error {
	m, what := r.podMap(by)
	if err := m.Put(key, pod.entry()); err != nil {
		return fmt.Errorf("redirecting pod with %s %d: %w", what, key, err)
	}
	return r.deleteOthers(by, key)
}

func (r *Redirect) get(by int, key uint64) (Pod, bool, error) {
	m, what := r.podMap(by)
	var entry redirectPod
	err := m.Lookup(key, &entry)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return Pod{}, false, nil
	case err != nil:
		return Pod{}, false, fmt.Errorf("looking up pod with %s %d: %w", what, key, err)
	}
	return entry.pod(), true, nil
}

func (r *Redirect) delete(by int, key uint64) error {
	m, what := r.podMap(by)
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("ending redirection of pod with %s %d: %w", what, key, err)
	}
	return r.deleteOthers(by, key)
}

// deleteOthers removes a pod from the other layouts.
func (r *Redirect) deleteOthers(by int, key uint64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.others {
		if err := t.delete(by, key); err != nil {
			_, what := r.podMap(by)
			return fmt.Errorf("ending redirection of pod with %s %d by another version: %w", what, key, err)
		}
	}
	return nil
}

// MarkSocket exempts the TCP socket with this file descriptor from redirection until it is
// closed. Mark it before it connects.
func (r *Redirect) MarkSocket(fd int) error {
	if err := r.maps.AgentSockets.Put(int32(fd), uint8(1)); err != nil {
		return fmt.Errorf("marking socket as the agent's own: %w", err)
	}
	return nil
}

// destinationKey returns the key by which the programs look up d.
func destinationKey(d netip.AddrPort) redirectDestination {
	return redirectDestination{Address: words(d.Addr()), Port: d.Port()}
}

// words returns an address as the maps contain it.
func words(a netip.Addr) (w [4]uint32) {
	address := a.As16()
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(address[4*i:])
	}
	return w
}
