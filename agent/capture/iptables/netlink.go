package iptables

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// mayExist reports whether the table may have a chain of ours. It starts no program: for a
// pod that is captured for the first time, no other question is necessary.
func (t Table) mayExist(table string) bool {
	_, err := t.request(unix.NFT_MSG_GETCHAIN, 0, map[int]string{unix.NFTA_CHAIN_TABLE: table, unix.NFTA_CHAIN_NAME: Chain}).
		Execute(unix.NETLINK_NETFILTER, 0)
	absent := []error{unix.ENOENT, unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EINVAL}
	return !slices.ContainsFunc(absent, func(is error) bool { return errors.Is(err, is) })
}

// jumpsFirst reports whether the first rule of OUTPUT is the jump to our chain. It reads no
// other: a pod can have made many.
func (t Table) jumpsFirst(table string) bool {
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return false
	}
	defer socket.Close()
	request := t.request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, map[int]string{unix.NFTA_RULE_TABLE: table, unix.NFTA_RULE_CHAIN: "OUTPUT"})
	if socket.SetReceiveTimeout(&unix.Timeval{Sec: 1}) != nil || socket.Send(request) != nil {
		return false
	}
	messages, from, err := socket.Receive()
	if err != nil || from.Pid != 0 || len(messages) == 0 || messages[0].Header.Seq != request.Seq || messages[0].Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWRULE {
		return false
	}
	rule := messages[0].Data[min(nl.SizeofNfgenmsg, len(messages[0].Data)):]
	expressions, err := nl.ParseRouteAttr(attribute(rule, unix.NFTA_RULE_EXPRESSIONS))
	if err != nil || len(expressions) != 2 { // a counter, and what iptables calls the target
		return false
	}
	is := func(value []byte, name string) bool { return string(value) == name+"\x00" }
	jump := expressions[1].Value
	verdict := attribute(jump, unix.NFTA_EXPR_DATA, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT)
	code := attribute(verdict, unix.NFTA_VERDICT_CODE)
	return is(attribute(expressions[0].Value, unix.NFTA_EXPR_NAME), "counter") &&
		is(attribute(jump, unix.NFTA_EXPR_NAME), "immediate") &&
		len(code) == 4 && int32(binary.BigEndian.Uint32(code)) == unix.NFT_JUMP &&
		is(attribute(verdict, unix.NFTA_VERDICT_CHAIN), Chain)
}

// request returns a request to nftables about the table's family.
func (t Table) request(kind, flags int, names map[int]string) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: map[int]uint8{4: unix.NFPROTO_IPV4, 6: unix.NFPROTO_IPV6}[t.Family]})
	for attribute, name := range names {
		r.AddData(nl.NewRtAttr(attribute, nl.ZeroTerminated(name)))
	}
	return r
}

// attribute returns the value of an attribute that is nested in others; nil if there is none.
func attribute(in []byte, path ...uint16) []byte {
	for _, kind := range path {
		attributes, err := nl.ParseRouteAttrAsMap(in)
		if err != nil {
			return nil
		}
		in = attributes[kind].Value
	}
	return in
}
