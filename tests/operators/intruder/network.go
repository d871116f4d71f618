package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	meshMark = 0x6d657368 // the mark of the mesh's own sockets
	patience = 3 * time.Second
)

// apiserver returns the apiserver's address in the pod's environment.
func apiserver() string {
	return net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
}

// issuer returns the issuer of the certificate of a connection's server.
func issuer(conn net.Conn) (string, error) {
	_ = conn.SetDeadline(time.Now().Add(patience))
	t := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, ServerName: "kubernetes.default.svc"}) // it inspects the certificate of any server
	defer t.Close()
	if err := t.Handshake(); err != nil {
		return "", err
	}
	return t.ConnectionState().PeerCertificates[0].Issuer.String(), nil
}

func isMesh(issuer string) bool { return strings.Contains(issuer, "O=ctrlmesh") }

// sniff reads the packets on the loopback, which must be only those of the pod's own
// connection to the mesh.
func sniff(ctx context.Context) (verdict, error) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return verdict{}, err
	}
	everything := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}) // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, int(everything))
	if err != nil {
		return verdict{}, fmt.Errorf("opening a packet socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: lo.Index}); err != nil {
		return verdict{}, fmt.Errorf("listening to the loopback: %w", err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}); err != nil {
		return verdict{}, err
	}
	own, err := ownAddresses()
	if err != nil {
		return verdict{}, err
	}
	seen := 0
	for end := time.Now().Add(patience); time.Now().Before(end) && ctx.Err() == nil; {
		if conn, err := net.DialTimeout("tcp", apiserver(), patience); err == nil {
			_, _ = issuer(conn)
		}
		packet := make([]byte, 1<<16)
		for {
			n, _, err := unix.Recvfrom(fd, packet, 0)
			if err != nil {
				break // nothing more for now
			}
			source, destination, ok := ends(packet[:n])
			if !ok {
				continue
			}
			seen++
			if !own[source] && !own[destination] {
				return broken("saw a packet of %v to %v", source, destination)
			}
		}
	}
	if seen == 0 {
		return verdict{}, errors.New("saw no packets, not even its own")
	}
	return held("saw %d packets, all its own", seen)
}

func ownAddresses() (map[netip.Addr]bool, error) {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	own := map[netip.Addr]bool{}
	for _, a := range addresses {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			return nil, err
		}
		own[prefix.Addr()] = true
	}
	return own, nil
}

// ends returns the addresses of an IP packet.
func ends(packet []byte) (source, destination netip.Addr, ok bool) {
	switch {
	case len(packet) >= 20 && packet[0]>>4 == 4:
		source, _ = netip.AddrFromSlice(packet[12:16])
		destination, _ = netip.AddrFromSlice(packet[16:20])
	case len(packet) >= 40 && packet[0]>>4 == 6:
		source, _ = netip.AddrFromSlice(packet[8:24])
		destination, _ = netip.AddrFromSlice(packet[24:40])
	default:
		return source, destination, false
	}
	return source, destination, true
}

// listeners returns the ports at which a process listens in this network namespace.
func listeners() ([]int, error) {
	const listening = "0A"
	var ports []int
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(table)
		if err != nil {
			return nil, err
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Fields(lines.Text())
			if len(fields) < 4 || fields[3] != listening {
				continue
			}
			_, hex, _ := strings.Cut(fields[1], ":")
			if port, err := strconv.ParseUint(hex, 16, 16); err == nil {
				ports = append(ports, int(port))
			}
		}
		f.Close()
	}
	return ports, nil
}

// join listens on the mesh's ports, to receive some of the connections of the pod's other
// processes.
func join() (verdict, error) {
	ports, err := listeners()
	if err != nil {
		return verdict{}, err
	}
	if len(ports) == 0 {
		return verdict{}, errors.New("nothing listens in this network namespace")
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) {
			err = errors.Join(
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
			)
		})
		return errors.Join(err, cerr)
	}}
	for _, port := range ports {
		for _, host := range []string{"127.0.0.1", "0.0.0.0", "::1", "::"} {
			l, err := config.Listen(context.Background(), "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
			if err == nil {
				_ = l.Close()
				return broken("listens at %s, port %d", host, port)
			}
			if !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return verdict{}, err
			}
		}
	}
	return held("ports %v are taken", ports)
}

// forge connects in unusual ways. The mesh must answer each of them.
func forge() (verdict, error) {
	address, err := netip.ParseAddrPort(apiserver())
	if err != nil {
		return verdict{}, err
	}
	option := func(level, name, value int) func(int) error {
		return func(fd int) error { return unix.SetsockoptInt(fd, level, name, value) }
	}
	var refused, answered int
	for _, way := range []struct {
		name     string
		protocol int
		prepare  func(fd int) error
		mapped   bool
		fastOpen bool
	}{
		{name: "the usual way"},
		{name: "the agent's mark", prepare: option(unix.SOL_SOCKET, unix.SO_MARK, meshMark)},
		{name: "bound to a device", prepare: func(fd int) error { return unix.BindToDevice(fd, "eth0") }},
		{name: "multipath TCP", protocol: unix.IPPROTO_MPTCP},
		{name: "mapped into IPv6", mapped: true},
		{name: "fast open", fastOpen: true},
		{name: "transparent", prepare: option(unix.SOL_IP, unix.IP_TRANSPARENT, 1)},
	} {
		issuer, err := by(address, way.protocol, way.prepare, way.mapped, way.fastOpen)
		switch {
		case err != nil && way.name == "the usual way":
			return verdict{}, err
		case err != nil:
			refused++ // that is safe
		case !isMesh(issuer):
			return broken("%s: %s answered", way.name, issuer)
		default:
			answered++
		}
	}
	return held("%d ways led to the mesh, %d nowhere", answered, refused)
}

// by connects by system calls and returns the issuer of the server's certificate.
func by(to netip.AddrPort, protocol int, prepare func(int) error, mapped, fastOpen bool) (string, error) {
	family := unix.AF_INET
	var address unix.Sockaddr = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	if mapped {
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM, protocol)
	if err != nil {
		return "", err
	}
	file := os.NewFile(uintptr(fd), "socket")
	defer file.Close()
	if prepare != nil {
		if err := prepare(fd); err != nil {
			return "", err
		}
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 3}); err != nil {
		return "", err
	}
	if fastOpen {
		err = unix.Sendto(fd, nil, unix.MSG_FASTOPEN, address)
	} else {
		err = unix.Connect(fd, address)
	}
	if err != nil {
		return "", err
	}
	conn, err := net.FileConn(file)
	if err != nil {
		return "", err
	}
	return issuer(conn)
}
