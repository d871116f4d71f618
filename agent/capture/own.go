package capture

import (
	"encoding/binary"
	"errors"
	"os"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// ownPod is the uid of the pods that agents make for themselves, but for the
// agent's process id at its end. Uids that Kubernetes makes are never like it.
var ownPod uuid.UUID

func isOwnPod(uid uuid.UUID) bool {
	return [12]byte(uid[:]) == [12]byte(ownPod[:])
}

// isGone tells whether a uid is of an agent's own pod, and the agent is gone.
func isGone(uid uuid.UUID) bool {
	if !isOwnPod(uid) {
		return false
	}
	pid := binary.BigEndian.Uint32(uid[12:])
	return errors.Is(unix.Kill(int(pid), 0), unix.ESRCH)
}

// makeOwn captures a network namespace with nothing in it but lo.
func (n *node) makeOwn() error {
	if n.health.own != nil || n.ways[0].mode() == Address {
		return nil
	}
	netns, err := newNetNS()
	if err != nil {
		return err
	}
	p := &Pod{uid: ownPod, node: n, way: n.ways[0], netns: netns}
	binary.BigEndian.PutUint32(p.uid[12:], uint32(os.Getpid()))
	if err := p.open(Request{}); err != nil {
		return errors.Join(err, p.closeFiles())
	}
	n.health.own = p
	return nil
}

// acceptOwn takes what waits to be accepted.
func (p *Pod) acceptOwn() {
	for _, l := range p.sockets {
		conn, err := l.SyscallConn()
		if err != nil {
			continue
		}
		_ = conn.Control(func(fd uintptr) {
			for {
				accepted, from, err := unix.Accept4(int(fd), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
				if err != nil {
					return
				}
				p.vitals.takes(int(addrPort(from).Port()))
				_ = unix.SetsockoptLinger(accepted, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
				_ = unix.Close(accepted)
			}
		})
	}
}

// name is the pod's uid as the outside knows it.
func (p *Pod) name() string {
	if isOwnPod(p.uid) {
		return ""
	}
	return p.uid.String()
}
