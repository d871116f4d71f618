// Package redirect has what package capture and its backends exchange.
package redirect

import (
	"net/netip"
	"os"

	"github.com/google/uuid"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
)

// Pod is what a backend needs to know to redirect a pod.
type Pod struct {
	UID         uuid.UUID
	NetNS       *os.File
	Rules       *netns.Rules // of NetNS; nil if nobody looks at them
	Cookie      uint64       // of NetNS; 0 if the kernel gives none
	HostNetwork bool         // NetNS is the node's
	Cgroup      uint64       // 0 if it is unknown; never under HostNetwork
	Port        uint16       // of the pod's listeners
	Egress      *Egress
	FailOpen    bool
	Stalled     bool  // its connections are not accepted
	Left        *Left // what an earlier agent made; what of it looks right is not made again
}

// Egress is the redirection of a pod's connections to other hosts than the apiserver.
type Egress struct {
	Ports []uint16 // sorted
	Port  uint16   // of the listeners
}

// Left is what an earlier agent left of a pod's redirection.
type Left struct {
	Port   uint16 // 0 if the pod is not redirected
	Egress *Egress
	// Rules are the lines that list the chains of IPv4 and IPv6, only by iptables.
	Rules [2][]string
}

// Failed is why a backend could not change or confirm the redirection of some pods. It
// is empty if it could for all.
type Failed map[uuid.UUID]error

// Nothing implements what a backend has nothing to do for.
type Nothing struct{}

// MarkSocket does nothing.
func (Nothing) MarkSocket(int) error { return nil }

// Sweep does nothing.
func (Nothing) Sweep(func(uid [16]byte) bool) error { return nil }

// Beat reports false.
func (Nothing) Beat() bool { return false }

// State returns that nothing is known: only a probe shows whether the pod is redirected.
func (Nothing) State(Pod) (state uint32, known bool) { return 0, false }

// Repair does nothing.
func (Nothing) Repair([]netip.AddrPort, []Pod) error { return nil }
