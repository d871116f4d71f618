package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
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
	err := replaceKeys(r.maps.OwnAddresses, own,
		func(a netip.Addr) redirectOwnAddress { return redirectOwnAddress{Uid: uid, Address: words(a)} },
		func(k redirectOwnAddress) bool { return k.Uid == uid })
	if err != nil {
		return fmt.Errorf("setting the pod's own addresses: %w", err)
	}
	err = replaceKeys(r.maps.EgressPorts, ports,
		func(port uint16) redirectEgressPort { return redirectEgressPort{Uid: uid, Port: port} },
		func(k redirectEgressPort) bool { return k.Uid == uid })
	if err != nil {
		return fmt.Errorf("setting the ports to redirect: %w", err)
	}
	r.sweptSlots.Store(false)
	// After the ports themselves: a process that clears slots reads the ports again.
	for _, port := range ports {
		if err := r.maps.setSlot(slotOf(port), 1); err != nil {
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
	_, err := matching(r.maps.EgressPorts, func(k redirectEgressPort, _ []byte) bool {
		if k.Uid == uid {
			ports = append(ports, k.Port)
		}
		return false
	})
	slices.Sort(ports)
	return slices.Compact(ports), failure.Wrap(err, "listing redirected ports")
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

// slots is SLOTS of redirect.c.
const slots = 4096

func slotOf(port uint16) uint32 { return uint32(port) % slots }

func (m *redirectMaps) setSlot(slot uint32, used uint8) error {
	return failure.Wrap(m.EgressSlots.Put(slot, used), "setting slot %d of ports", slot)
}

// sweepEgress removes the ports and addresses of pods for which keep is false, and clears
// unused slots. Another process may set ports meanwhile.
func (r *Redirect) sweepEgress(keep func(uid [16]byte) bool) error {
	err := errors.Join(
		deleteMatching(r.maps.EgressPorts, func(k redirectEgressPort, _ []byte) bool { return !keep(k.Uid) }),
		deleteMatching(r.maps.OwnAddresses, func(k redirectOwnAddress, _ []byte) bool { return !keep(k.Uid) }),
	)
	if err != nil {
		return fmt.Errorf("removing the ports of deleted pods: %w", err)
	}
	if r.sweptSlots.Swap(true) {
		return nil
	}
	used, err := r.maps.usedSlots()
	if err != nil {
		return err
	}
	unused, err := matching(r.maps.EgressSlots, func(slot uint32, value []byte) bool { return value[0] != 0 && !used[slot] })
	if err != nil || len(unused) == 0 {
		return failure.Wrap(err, "looking up slots of ports")
	}
	for _, slot := range unused {
		if err := r.maps.setSlot(slot, 0); err != nil {
			return err
		}
	}
	// Set again the slots of ports that were added since they were read.
	if used, err = r.maps.usedSlots(); err != nil {
		return err
	}
	for slot := range used {
		if err := r.maps.setSlot(slot, 1); err != nil {
			return err
		}
	}
	return nil
}

// usedSlots returns the slots of the ports that are redirected.
func (m *redirectMaps) usedSlots() (map[uint32]bool, error) {
	used := map[uint32]bool{}
	_, err := matching(m.EgressPorts, func(k redirectEgressPort, _ []byte) bool {
		used[slotOf(k.Port)] = true
		return false
	})
	return used, failure.Wrap(err, "listing redirected ports")
}
