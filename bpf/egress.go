package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/cilium/ebpf"
)

// SetEgress sets the ports at which connections of the pod with this uid to hosts other
// than the apiserver are redirected. Connections to own, the pod's own addresses, are not.
// It takes effect while the pod's entry has an Egress port (see [Pod]). Ports that stay
// are redirected throughout; without ports, no entries are left.
func (r *Redirect) SetEgress(uid [16]byte, ports []uint16, own []netip.Addr) error {
	if len(ports) > 0 {
		if err := r.Egress(); err != nil {
			return err
		}
	}
	addresses := make(map[redirectOwnAddress]bool, len(own))
	for _, a := range own {
		addresses[redirectOwnAddress{Uid: uid, Address: words(a)}] = true
	}
	wanted := make(map[redirectEgressPort]bool, len(ports))
	for _, port := range ports {
		wanted[redirectEgressPort{Uid: uid, Port: port}] = true
	}
	if err := setOf(r.maps.OwnAddresses, uid, addresses); err != nil {
		return fmt.Errorf("setting the pod's own addresses: %w", err)
	}
	if err := setOf(r.maps.EgressPorts, uid, wanted); err != nil {
		return fmt.Errorf("setting the ports to redirect: %w", err)
	}
	r.sweptSlots.Store(false)
	// After the ports themselves: a process that clears slots reads the ports again.
	for _, port := range ports {
		if err := r.useSlot(port); err != nil {
			return err
		}
	}
	return nil
}

// HasEgress reports whether all of the ports are redirected, as [Redirect.SetEgress] set them.
func (r *Redirect) HasEgress(uid [16]byte, ports []uint16) (bool, error) {
	var is uint8
	for _, port := range ports {
		err := r.maps.EgressPorts.Lookup(redirectEgressPort{Uid: uid, Port: port}, &is)
		if err == nil {
			err = r.maps.EgressSlots.Lookup(slotOf(port), &is)
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && is == 0 {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("looking up redirected ports: %w", err)
		}
	}
	return true, nil
}

// EgressPorts returns the ports of the last [Redirect.SetEgress], sorted.
func (r *Redirect) EgressPorts(uid [16]byte) ([]uint16, error) {
	var ports []uint16
	var key redirectEgressPort
	var one uint8
	it := r.maps.EgressPorts.Iterate()
	for it.Next(&key, &one) {
		if key.Uid == uid {
			ports = append(ports, key.Port)
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("listing redirected ports: %w", err)
	}
	slices.Sort(ports)
	return slices.Compact(ports), nil
}

// TakeOrigin returns the original destination of a connection from an address to the
// listener at a port, in the network namespace with this cookie, and forgets it. It
// returns false if the client connected to the listener itself.
func (r *Redirect) TakeOrigin(cookie uint64, from netip.AddrPort, port uint16) (netip.AddrPort, bool, error) {
	r.taking.RLock()
	defer r.taking.RUnlock()
	if r.closed {
		return netip.AddrPort{}, false, os.ErrClosed
	}
	key := redirectOrigin{Netns: cookie, Address: words(from.Addr()), Port: from.Port(), To: port}
	var to redirectDestination
	err := r.maps.Origins.Lookup(key, &to)
	if err == nil {
		err = r.maps.Origins.Delete(key)
	}
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return netip.AddrPort{}, false, nil
	case err != nil:
		return netip.AddrPort{}, false, fmt.Errorf("looking up the original destination of a connection: %w", err)
	}
	var address [16]byte
	for i, word := range to.Address {
		binary.NativeEndian.PutUint32(address[4*i:], word)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(address).Unmap(), to.Port), true, nil
}

// egressKey is a key that begins with the pod's uid.
type egressKey interface {
	redirectEgressPort | redirectOwnAddress
	uid() [16]byte
}

func (k redirectEgressPort) uid() [16]byte { return k.Uid }
func (k redirectOwnAddress) uid() [16]byte { return k.Uid }

// setOf replaces the keys of one pod; it adds new ones before it removes old ones.
func setOf[K egressKey](m *ebpf.Map, uid [16]byte, wanted map[K]bool) error {
	for key := range wanted {
		if err := m.Put(key, uint8(1)); err != nil {
			return err
		}
	}
	return deleteKeys(m, func(key K) bool { return key.uid() == uid && !wanted[key] })
}

// deleteKeys deletes the keys that match.
func deleteKeys[K egressKey](m *ebpf.Map, match func(K) bool) error {
	var key K
	var one uint8
	var unwanted []K
	it := m.Iterate()
	for it.Next(&key, &one) {
		if match(key) {
			unwanted = append(unwanted, key)
		}
	}
	if err := it.Err(); err != nil {
		return err
	}
	for _, key := range unwanted {
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return nil
}

// slots is SLOTS of redirect.c.
const slots = 4096

func slotOf(port uint16) uint32 { return uint32(port) % slots }

func (r *Redirect) useSlot(port uint16) error {
	if err := r.maps.EgressSlots.Put(slotOf(port), uint8(1)); err != nil {
		return fmt.Errorf("redirecting port %d: %w", port, err)
	}
	return nil
}

// sweepEgress removes the ports and addresses of pods for which keep is false, and clears
// unused slots. Another process may set ports meanwhile.
func (r *Redirect) sweepEgress(keep func(uid [16]byte) bool) error {
	err := errors.Join(
		deleteKeys(r.maps.EgressPorts, func(k redirectEgressPort) bool { return !keep(k.Uid) }),
		deleteKeys(r.maps.OwnAddresses, func(k redirectOwnAddress) bool { return !keep(k.Uid) }),
	)
	if err != nil {
		return fmt.Errorf("removing the ports of deleted pods: %w", err)
	}
	if r.sweptSlots.Swap(true) {
		return nil
	}
	used, err := r.usedSlots()
	if err != nil {
		return err
	}
	var cleared bool
	for slot := range uint32(slots) {
		var is uint8
		if used[slot] {
			continue
		}
		if err := r.maps.EgressSlots.Lookup(slot, &is); err != nil {
			return fmt.Errorf("looking up slot of ports: %w", err)
		}
		if is == 0 {
			continue
		}
		cleared = true
		if err := r.maps.EgressSlots.Put(slot, uint8(0)); err != nil {
			return fmt.Errorf("clearing slot of ports: %w", err)
		}
	}
	if !cleared {
		return nil
	}
	// Set again the slots of ports that were added since they were read.
	if used, err = r.usedSlots(); err != nil {
		return err
	}
	for slot := range used {
		if err := r.useSlot(uint16(slot)); err != nil {
			return err
		}
	}
	return nil
}

// usedSlots returns the slots of the ports that are redirected.
func (r *Redirect) usedSlots() (map[uint32]bool, error) {
	used := map[uint32]bool{}
	var key redirectEgressPort
	var one uint8
	it := r.maps.EgressPorts.Iterate()
	for it.Next(&key, &one) {
		used[slotOf(key.Port)] = true
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("listing redirected ports: %w", err)
	}
	return used, nil
}
