package netns

import (
	"encoding/binary"
	"errors"
	"os"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Rules are the rules of nftables in a network namespace. They keep a socket in it: to enter the namespace for
// each question takes much longer than to ask. The kernel could also send changes to it, but once anybody is sent
// them, each change of rules anywhere on the node takes half as long again.
type Rules struct {
	socket int // -1: closed
}

// strangers is how many messages of others are read while an answer is waited for: any process in the pod that may
// change rules may send some.
const strangers = 16

// OpenRules opens the rules of a network namespace, which stays until Close.
func OpenRules(namespace *os.File) (r *Rules, err error) {
	r = &Rules{socket: -1}
	err = Do(namespace, func() (err error) {
		r.socket, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	})
	return r, failure.Wrap(err, "opening the rules of a network namespace")
}

// Generation returns a number that is another one after every change of the rules. It is called by one goroutine at
// a time.
func (r *Rules) Generation() (uint32, error) {
	if r == nil || r.socket < 0 {
		return 0, os.ErrClosed
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	request.AddData(&nl.Nfgenmsg{})
	if err := unix.Sendto(r.socket, request.Serialize(), unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, failure.Wrap(err, "asking for the generation of rules")
	}
	var answer [256]byte
	for range strangers {
		n, from, err := unix.Recvfrom(r.socket, answer[:], unix.MSG_DONTWAIT) // the kernel has answered
		if err != nil {
			return 0, failure.Wrap(err, "asking for the generation of rules")
		}
		if peer, ok := from.(*unix.SockaddrNetlink); !ok || peer.Pid != 0 {
			continue
		}
		messages, err := syscall.ParseNetlinkMessage(answer[:n])
		if err != nil || len(messages) != 1 || messages[0].Header.Seq != request.Seq {
			continue
		}
		if generation, ok := generationIn(messages[0]); ok {
			return generation, nil
		}
		break
	}
	return 0, errors.New("asking for the generation of rules: the kernel named none")
}

func generationIn(m syscall.NetlinkMessage) (generation uint32, ok bool) {
	if m.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN || len(m.Data) < nl.SizeofNfgenmsg {
		return 0, false
	}
	attributes, err := nl.ParseRouteAttrAsMap(m.Data[nl.SizeofNfgenmsg:])
	id := attributes[unix.NFTA_GEN_ID].Value
	if err != nil || len(id) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(id), true
}

// Close closes the socket, unless r is nil.
func (r *Rules) Close() {
	if r != nil && r.socket >= 0 {
		_ = unix.Close(r.socket)
		r.socket = -1
	}
}
