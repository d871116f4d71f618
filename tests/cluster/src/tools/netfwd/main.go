// netfwd PORT PORTFILE TARGET
//
// creates a network namespace for as long as it runs, and forwards 127.0.0.1:PORT of the
// namespace in which it was started to TARGET inside the new one. PORT 0 chooses a free one and
// writes it to PORTFILE. This is the only connection to the cluster: it needs no link, route or
// rule outside.
package main

import (
	"io"
	"log"
	"net"
	"os"
	"runtime"
	"strconv"
	"syscall"
)

func init() { runtime.LockOSThread() } // unshare concerns one thread: the one that calls exec

func main() {
	log.SetFlags(0)
	if len(os.Args) == 4 {
		enter(os.Args[1], os.Args[2], os.Args[3])
	}
	serve(os.Args[1])
}

// enter listens outside, moves inside, and becomes this program again with the listener as file 3.
func enter(port, portFile, target string) {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", port))
	check(err)
	f, err := l.(*net.TCPListener).File()
	check(err)
	check(syscall.Unshare(syscall.CLONE_NEWNET))
	check(os.WriteFile(portFile+".new", []byte(strconv.Itoa(l.Addr().(*net.TCPAddr).Port)), 0o644))
	check(os.Rename(portFile+".new", portFile))
	check(syscall.Dup3(int(f.Fd()), 3, 0)) // without close-on-exec
	check(syscall.Exec("/proc/self/exe", []string{os.Args[0], target}, os.Environ()))
}

func serve(target string) {
	l, err := net.FileListener(os.NewFile(3, "listener"))
	check(err)
	for {
		c, err := l.Accept()
		check(err)
		go forward(c.(*net.TCPConn), target)
	}
}

func forward(c *net.TCPConn, target string) {
	defer c.Close()
	d, err := net.Dial("tcp", target)
	if err != nil {
		c.SetLinger(0) // refused inside: reset outside
		return
	}
	defer d.Close()
	up := d.(*net.TCPConn)
	done := make(chan struct{})
	go func() { io.Copy(up, c); up.CloseWrite(); close(done) }()
	if _, err := io.Copy(c, up); err != nil {
		c.SetLinger(0)
	}
	c.CloseWrite()
	<-done
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
