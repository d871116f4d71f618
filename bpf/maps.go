package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
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
	err := replaceKeys(r.maps.Destinations, destinations, destinationKey, func(redirectDestination) bool { return true })
	return failure.Wrap(err, "setting the destinations")
}

// Key is what the programs know a pod by.
type Key struct {
	by int // the index of a table's map
	id uint64
}

// ByCookie returns the key of the pod whose network namespace has this cookie.
func ByCookie(cookie uint64) Key { return Key{0, cookie} }

// ByCgroup returns the key of the pod whose cgroup has this id, in a network namespace
// that [Redirect.SetHost] named.
func ByCgroup(id uint64) Key { return Key{1, id} }

// String names the key in errors.
func (k Key) String() string {
	return fmt.Sprintf("%s %d", []string{"netns cookie", "cgroup"}[k.by], k.id)
}

// SetPod redirects a pod. It replaces an earlier entry atomically, in another layout too:
// every connect sees one or the other. There are at most 16384 entries.
func (r *Redirect) SetPod(k Key, pod Pod) error {
	if k.by == ByCgroup(0).by {
		if err := r.HostNetwork(); err != nil {
			return err
		}
	}
	if err := r.maps.table().maps[k.by].Put(k.id, pod.entry()); err != nil {
		return fmt.Errorf("redirecting pod with %s: %w", k, err)
	}
	return r.deleteOthers(k)
}

// SetHost makes the network namespace with this cookie the node's: the programs
// distinguish the pods in it by their cgroups.
func (r *Redirect) SetHost(cookie uint64) error {
	err := r.maps.Pods.Put(cookie, redirectPod{Flags: flagHost})
	return failure.Wrap(err, "setting netns cookie %d as the node's", cookie)
}

// Pod returns the entry of a pod, and whether there is one.
func (r *Redirect) Pod(k Key) (Pod, bool, error) {
	var entry redirectPod
	err := r.maps.table().maps[k.by].Lookup(k.id, &entry)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Pod{}, false, nil
	}
	return entry.pod(), err == nil, failure.Wrap(err, "looking up pod with %s", k)
}

// DeletePod ends the redirection of a pod: its connections go direct. It succeeds if the
// pod was not redirected.
func (r *Redirect) DeletePod(k Key) error {
	if err := r.maps.table().delete(k); err != nil {
		return err
	}
	return r.deleteOthers(k)
}

// table returns the pods of this layout.
func (m *redirectMaps) table() *table { return &table{maps: []*ebpf.Map{m.Pods, m.Cgroups}} }

// deleteOthers removes a pod from the other layouts.
func (r *Redirect) deleteOthers(k Key) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.others {
		if err := t.delete(k); err != nil {
			return err
		}
	}
	return nil
}

// MarkSocket exempts the TCP socket with this file descriptor from redirection until it is
// closed. Mark it before it connects.
func (r *Redirect) MarkSocket(fd int) error {
	return failure.Wrap(r.maps.AgentSockets.Put(int32(fd), uint8(1)), "marking socket as the agent's own")
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

// replaceKeys makes the keys of list those of a map, except for keys that are not replaced.
// It adds new ones before it removes old ones.
func replaceKeys[E any, K comparable](m *ebpf.Map, list []E, keyOf func(E) K, replaced func(K) bool) error {
	wanted := make(map[K]bool, len(list))
	for _, e := range list {
		wanted[keyOf(e)] = true
		if err := m.Put(keyOf(e), uint8(1)); err != nil {
			return err
		}
	}
	return deleteMatching(m, func(key K, _ []byte) bool { return replaced(key) && !wanted[key] })
}

// deleteMatching deletes the entries that match.
func deleteMatching[K any](m *ebpf.Map, match func(key K, value []byte) bool) error {
	keys, err := matching(m, match)
	for _, key := range keys {
		err = errors.Join(err, deleteKey(m, key))
	}
	return err
}

// deleteKey deletes a key that may not exist.
func deleteKey(m *ebpf.Map, key any) error {
	if err := m.Delete(key); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// matching returns the keys of the entries that match.
func matching[K any](m *ebpf.Map, match func(key K, value []byte) bool) (keys []K, err error) {
	var key K
	value := make([]byte, m.ValueSize())
	it := m.Iterate()
	for it.Next(&key, &value) {
		if match(key, value) {
			keys = append(keys, key)
		}
	}
	return keys, it.Err()
}
