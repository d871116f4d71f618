package netns

import (
	"encoding/binary"
	"errors"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Rules are the rules of nftables in a network namespace. They keep a socket in it: to enter the namespace for
// each question takes six times as long.
type Rules struct{ socket *nl.SocketHandle }

// OpenRules opens the rules of a network namespace, which stays until Close.
func OpenRules(namespace *os.File) (r *Rules, err error) {
	err = Do(namespace, func() error {
		socket, err := nl.Subscribe(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		r = &Rules{&nl.SocketHandle{Socket: socket}}
		return socket.SetReceiveTimeout(&unix.Timeval{Sec: 1})
	})
	if err != nil {
		r.Close()
		return nil, failure.Wrap(err, "opening the rules of a network namespace")
	}
	return r, nil
}

// Generation returns a number that is another one after every change of the rules.
func (r *Rules) Generation() (uint32, error) {
	if r == nil {
		return 0, os.ErrClosed
	}
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: r.socket}
	request.AddData(&nl.Nfgenmsg{})
	answers, err := request.Execute(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN)
	if err != nil {
		return 0, failure.Wrap(err, "asking for the generation of rules")
	}
	for _, answer := range answers {
		attributes, err := nl.ParseRouteAttr(answer[min(nl.SizeofNfgenmsg, len(answer)):])
		if err != nil {
			return 0, failure.Wrap(err, "reading the generation of rules")
		}
		for _, a := range attributes {
			if a.Attr.Type == unix.NFTA_GEN_ID && len(a.Value) == 4 {
				return binary.BigEndian.Uint32(a.Value), nil
			}
		}
	}
	return 0, errors.New("asking for the generation of rules: the kernel named none")
}

// Close closes the socket, unless r is nil.
func (r *Rules) Close() {
	if r != nil {
		r.socket.Close()
	}
}
