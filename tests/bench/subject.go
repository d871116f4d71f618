package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// subject is a proxy between the client and the apiserver, or none.
type subject struct {
	name    string
	pid     int // of the proxy; 0: there is none
	clients []*client
}

const connections = 4

const (
	direct    = "direct"
	plain     = "ReverseProxy"
	haproxy   = "HAProxy"
	oneThread = "HAProxy, 1 thread"
	nginx     = "nginx"
	ctrlmesh  = "ctrlmesh"
	hundred   = "ctrlmesh, 100 rules"
)

// subjects starts the proxies. They exit with ctx, or with this process.
func subjects(ctx context.Context, o options, token, dir string) ([]*subject, error) {
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return nil, err
	}
	o.cert = filepath.Join(dir, "serving.pem")
	cert, err := writeCertificate(o.cert)
	if err != nil {
		return nil, err
	}
	all := []*subject{{name: direct, clients: newClients(o.api, ca, token)}}
	for _, p := range []struct {
		name    string
		command []string
		config  func(addr string) string // of the file that is the last argument; nil: there is none
	}{
		{plain, o.forProxy("plain"), nil},
		{haproxy, []string{"haproxy", "-q", "-db", "-f"}, func(string) string { return haproxyConfig(o) }},
		{oneThread, []string{"haproxy", "-q", "-db", "-f"}, func(string) string { return haproxyConfig(o, "nbthread 1") }},
		{nginx, []string{"nginx", "-e", "stderr", "-c"}, func(addr string) string { return nginxConfig(o, addr) }},
		{ctrlmesh, o.forProxy("mesh"), nil},
		{hundred, append(o.forProxy("mesh"), "-policy", "rules"), nil},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		if p.config != nil {
			config := filepath.Join(dir, p.name)
			if err := os.WriteFile(config, []byte(p.config(l.Addr().String())), 0o600); err != nil {
				return nil, err
			}
			p.command = append(p.command, config)
		}
		pid, addr, err := startAt(ctx, l, p.command)
		if err != nil {
			return nil, fmt.Errorf("starting %s: %w", p.name, err)
		}
		all = append(all, &subject{name: p.name, pid: pid, clients: newClients(addr, cert, token)})
	}
	return all, nil
}

// start runs a proxy with a listener that exists before the process, so that no client has to
// wait for it.
func start(ctx context.Context, command []string) (pid int, addr string, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, "", err
	}
	return startAt(ctx, l, command)
}

// startAt is start with the listener, which it closes.
func startAt(ctx context.Context, l net.Listener, command []string) (pid int, addr string, err error) {
	defer func() { _ = l.Close() }()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = f.Close() }()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = []*os.File{f}
	cmd.Env = append(os.Environ(), "GOMEMLIMIT=576MiB", "NGINX=3;") // as in the agent's manifest; the listener of nginx
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 2 * time.Second
	if err := cmd.Start(); err != nil {
		return 0, "", err
	}
	running.Go(func() {
		if err := cmd.Wait(); ctx.Err() == nil {
			fmt.Fprintf(os.Stderr, "bench: %s ended: %v\n", command[0], err)
		}
	})
	return cmd.Process.Pid, l.Addr().String(), nil
}

// cpu returns the CPU time that the proxy has used, user and system.
func (s *subject) cpu() (time.Duration, error) {
	if s.pid == 0 {
		return 0, nil
	}
	var used time.Duration
	for _, pid := range s.processes() {
		of, err := stats.ProcessorTime(pid)
		if err != nil {
			return 0, fmt.Errorf("%s: CPU time: %w", s.name, err)
		}
		used += of
	}
	return used, nil
}

// rss returns the proxy's resident memory in bytes.
func (s *subject) rss() (int64, error) {
	if s.pid == 0 {
		return 0, nil
	}
	var resident int64
	for _, pid := range s.processes() {
		m, err := stats.MemoryOf(pid)
		if err != nil {
			return 0, fmt.Errorf("%s: memory: %w", s.name, err)
		}
		resident += m.Resident
	}
	return resident, nil
}

// processes returns the proxy's process and its children, which are nginx's workers.
func (s *subject) processes() []int {
	all := []int{s.pid}
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", s.pid))
	for child := range strings.FieldsSeq(string(children)) {
		if pid, err := strconv.Atoi(child); err == nil {
			all = append(all, pid)
		}
	}
	return all
}
