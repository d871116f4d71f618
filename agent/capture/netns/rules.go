package netns

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Rules notice changes of nftables' rules in a network namespace, by a socket in it to which the kernel sends them.
type Rules struct {
	socket  int
	changes uint32
}

// atOnce bounds the messages that one call of Changes reads: a pod can cause them without end.
const atOnce = 16

// OpenRules opens the rules of a network namespace, which stays until Close.
func OpenRules(namespace *os.File) (r *Rules, err error) {
	err = Do(namespace, func() error {
		socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		r = &Rules{socket: socket}
		return errors.Join(
			unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_RCVBUF, 1), // the least there is: that messages were lost says enough
			unix.Bind(socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)}))
	})
	if err != nil {
		r.Close()
		return nil, failure.Wrap(err, "opening the rules of a network namespace")
	}
	return r, nil
}

// Changes returns a number that is another one after every change of the rules. It is called by one goroutine at a
// time.
func (r *Rules) Changes() (uint32, error) {
	if r == nil {
		return 0, os.ErrClosed
	}
	var unused [1]byte // the kernel drops the rest of a message
	for range atOnce {
		switch _, _, err := unix.Recvfrom(r.socket, unused[:], unix.MSG_DONTWAIT); {
		case errors.Is(err, unix.EAGAIN):
			return r.changes, nil
		case err == nil, errors.Is(err, unix.ENOBUFS): // messages were lost
			r.changes++
		default:
			return 0, failure.Wrap(err, "reading changes of rules")
		}
	}
	return r.changes, nil
}

// Close closes the socket, unless r is nil.
func (r *Rules) Close() {
	if r != nil {
		_ = unix.Close(r.socket)
	}
}
