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
	UID  [16]byte // the pod's uid, for who finds the entry later
	Port uint16   // of the listener on 127.0.0.1 and ::1 in the pod's network namespace
}

// SetDestinations makes destinations the addresses whose connections are
// redirected, and no others. What stays in the set is redirected throughout;
// what is new is added before anything is removed. There is room for 4096.
func (r *Redirect) SetDestinations(destinations []netip.AddrPort) error {
	wanted := make(map[redirectDestination]bool, len(destinations))
	for _, d := range destinations {
		key := destinationKey(d)
		wanted[key] = true
		if err := r.maps.Destinations.Put(key, uint8(1)); err != nil {
			return fmt.Errorf("add destination %s: %w", d, err)
		}
	}
	var key redirectDestination
	var one uint8
	var gone []redirectDestination
	for it := r.maps.Destinations.Iterate(); ; {
		if !it.Next(&key, &one) {
			if err := it.Err(); err != nil {
				return fmt.Errorf("list destinations: %w", err)
			}
			break
		}
		if !wanted[key] {
			gone = append(gone, key)
		}
	}
	for _, key := range gone {
		if err := r.maps.Destinations.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove destination: %w", err)
		}
	}
	return nil
}

// SetPod redirects the pod whose network namespace has this cookie. An earlier
// entry is replaced at once: every connect sees the one or the other. There is
// room for 16384.
func (r *Redirect) SetPod(cookie uint64, pod Pod) error {
	if err := r.maps.Pods.Put(cookie, redirectPod{Uid: pod.UID, Port: pod.Port}); err != nil {
		return fmt.Errorf("redirect pod with netns cookie %d: %w", cookie, err)
	}
	return nil
}

// Pod returns the entry of the pod whose network namespace has this cookie, and whether there is one.
func (r *Redirect) Pod(cookie uint64) (Pod, bool, error) {
	var pod redirectPod
	err := r.maps.Pods.Lookup(cookie, &pod)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return Pod{}, false, nil
	case err != nil:
		return Pod{}, false, fmt.Errorf("look up pod with netns cookie %d: %w", cookie, err)
	}
	return Pod{UID: pod.Uid, Port: pod.Port}, true, nil
}

// Pods returns the redirected pods by the cookie of their network namespace,
// an earlier process's among them.
func (r *Redirect) Pods() (map[uint64]Pod, error) {
	pods := map[uint64]Pod{}
	var cookie uint64
	var pod redirectPod
	it := r.maps.Pods.Iterate()
	for it.Next(&cookie, &pod) {
		pods[cookie] = Pod{UID: pod.Uid, Port: pod.Port}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list redirected pods: %w", err)
	}
	return pods, nil
}

// DeletePod ends the redirection of a pod: its connections go direct. It is no
// error if there was none.
func (r *Redirect) DeletePod(cookie uint64) error {
	if err := r.maps.Pods.Delete(cookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("end redirection of pod with netns cookie %d: %w", cookie, err)
	}
	return nil
}

// MarkSocket lets the TCP socket with this file descriptor pass untouched, for
// as long as it lives. It must be marked before it connects.
func (r *Redirect) MarkSocket(fd int) error {
	if err := r.maps.AgentSockets.Put(int32(fd), uint8(1)); err != nil {
		return fmt.Errorf("mark socket as the agent's own: %w", err)
	}
	return nil
}

// destinationKey is d as the programs look it up.
func destinationKey(d netip.AddrPort) redirectDestination {
	key := redirectDestination{Port: d.Port()}
	address := d.Addr().As16()
	for i := range key.Address {
		key.Address[i] = binary.NativeEndian.Uint32(address[4*i:])
	}
	return key
}
