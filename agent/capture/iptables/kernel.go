package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// haveIPv6 reports whether the network namespace has an IPv6 address.
func haveIPv6() bool {
	addresses, err := os.ReadFile("/proc/thread-self/net/if_inet6")
	return err == nil && len(addresses) > 0 || err != nil && !errors.Is(err, os.ErrNotExist)
}

// originalDestination returns where an accepted connection went before it was redirected.
func originalDestination(fd uintptr, v6 bool) (netip.AddrPort, error) {
	const original = 80 // SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST
	if v6 {
		var to unix.RawSockaddrInet6
		err := getsockopt(fd, unix.SOL_IPV6, original, unsafe.Pointer(&to), unsafe.Sizeof(to))
		return netip.AddrPortFrom(netip.AddrFrom16(to.Addr), networkOrder(to.Port)), err
	}
	var to unix.RawSockaddrInet4
	err := getsockopt(fd, unix.SOL_IP, original, unsafe.Pointer(&to), unsafe.Sizeof(to))
	return netip.AddrPortFrom(netip.AddrFrom4(to.Addr), networkOrder(to.Port)), err
}

func getsockopt(fd uintptr, level, name int, value unsafe.Pointer, size uintptr) error {
	length := uint32(size)
	if _, _, code := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, uintptr(level), uintptr(name), uintptr(value), uintptr(unsafe.Pointer(&length)), 0); code != 0 {
		return os.NewSyscallError("getsockopt", code)
	}
	return nil
}

// networkOrder converts a port from the byte order of the kernel's addresses.
func networkOrder(port uint16) uint16 {
	return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, port))
}

// refusesUDP returns an error if a datagram to a port of an unused address is not refused.
// Without a route there is nothing to refuse.
func refusesUDP(port uint16) error {
	for family, unused := range map[int]unix.Sockaddr{
		unix.AF_INET:  &unix.SockaddrInet4{Addr: [4]byte{192, 0, 2, 1}, Port: int(port)},
		unix.AF_INET6: &unix.SockaddrInet6{Addr: [16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1}, Port: int(port)},
	} {
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			continue
		}
		err = unix.Sendto(fd, nil, 0, unused)
		_ = unix.Close(fd)
		if err == nil {
			return fmt.Errorf("a datagram to port %d was not refused", port)
		}
	}
	return nil
}
