package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
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
	direct   = "direct"
	plain    = "ReverseProxy"
	haproxy  = "HAProxy"
	ctrlmesh = "ctrlmesh"
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
	config := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(config, []byte(haproxyConfig(o, o.haproxyUpstream)), 0o600); err != nil {
		return nil, err
	}
	all := []*subject{{name: direct, clients: newClients(o.api, ca, token)}}
	for _, p := range []struct {
		name    string
		command []string
	}{
		{plain, o.forProxy("plain")},
		{haproxy, []string{"haproxy", "-q", "-db", "-f", config}},
		{ctrlmesh, o.forProxy("mesh")},
	} {
		pid, addr, err := start(ctx, p.command)
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
	defer func() { _ = l.Close() }()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = f.Close() }()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = []*os.File{f}
	cmd.Env = append(os.Environ(), "GOMEMLIMIT=576MiB") // as in the agent's manifest
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
	used, err := stats.ProcessorTime(s.pid)
	return used, failure.Wrap(err, "%s: CPU time", s.name)
}

// rss returns the proxy's resident memory in bytes.
func (s *subject) rss() (int64, error) {
	if s.pid == 0 {
		return 0, nil
	}
	m, err := stats.MemoryOf(s.pid)
	return m.Resident, failure.Wrap(err, "%s: memory", s.name)
}
