package netns

import (
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Rules are the rules of nftables in a network namespace. They keep a socket in it: to enter the namespace for
// each question takes much longer than to ask. The kernel could also send changes to it, but once anybody is sent
// them, each change of rules anywhere on the node takes half as long again.
type Rules struct {
	socket   int    // -1: closed
	request  []byte // of the generation
	sequence uint32 // of the last request
	answer   [256]byte
}

// sequenceAt is where a message of netlink has its number.
const sequenceAt = 8

// OpenRules opens the rules of a network namespace, which stays until Close.
func OpenRules(namespace *os.File) (r *Rules, err error) {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	request.AddData(&nl.Nfgenmsg{})
	r = &Rules{socket: -1, request: request.Serialize()}
	err = Do(namespace, func() (err error) {
		r.socket, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		// Once it is connected to the kernel, no process in the pod can send to it.
		return unix.Connect(r.socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	})
	if err != nil {
		r.Close()
	}
	return r, failure.Wrap(err, "opening the rules of a network namespace")
}

// Generation returns a number that is another one after every change of the rules. It is called by one goroutine at
// a time.
func (r *Rules) Generation() (uint32, error) {
	if r == nil || r.socket < 0 {
		return 0, os.ErrClosed
	}
	r.sequence++
	binary.NativeEndian.PutUint32(r.request[sequenceAt:], r.sequence)
	if _, err := unix.Write(r.socket, r.request); err != nil {
		return 0, failure.Wrap(err, "asking for the generation of rules")
	}
	for {
		n, err := unix.Read(r.socket, r.answer[:]) // the kernel has answered
		if err != nil {
			return 0, failure.Wrap(err, "asking for the generation of rules")
		}
		messages, err := syscall.ParseNetlinkMessage(r.answer[:n])
		if err != nil || len(messages) != 1 || messages[0].Header.Seq != r.sequence {
			continue // to an earlier request
		}
		if generation, ok := generationIn(messages[0]); ok {
			return generation, nil
		}
		return 0, errors.New("asking for the generation of rules: the kernel named none")
	}
}

func generationIn(m syscall.NetlinkMessage) (generation uint32, ok bool) {
	if m.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN || len(m.Data) < nl.SizeofNfgenmsg {
		return 0, false
	}
	attributes, err := nl.ParseRouteAttr(m.Data[nl.SizeofNfgenmsg:])
	i := slices.IndexFunc(attributes, func(a syscall.NetlinkRouteAttr) bool { return a.Attr.Type == unix.NFTA_GEN_ID })
	if err != nil || i < 0 || len(attributes[i].Value) != 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(attributes[i].Value), true
}

// Close closes the socket, unless r is nil.
func (r *Rules) Close() {
	if r != nil && r.socket >= 0 {
		_ = unix.Close(r.socket)
		r.socket = -1
	}
}
