// Package prometheus runs the real Prometheus: by itself, or in the cluster's network with the alerts of the
// mesh.
package prometheus

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/netns"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/tools"
)

// startsWithin limits how long Prometheus may take to be ready.
const startsWithin = time.Minute

// Program returns the path of a program of Prometheus, which is built first. root is the root directory of the
// repository.
func Program(ctx context.Context, root, name string) (string, error) {
	return tools.Program(ctx, root, "prometheus", name)
}

// Options say how a Prometheus runs.
type Options struct {
	Root      string   // of the repository
	Directory string   // an empty one, for its configuration and data
	Config    any      // of Prometheus
	Network   *os.File // the network namespace to run in; nil: that of this process
}

// Server is a Prometheus that runs.
type Server struct {
	URL string // in its network
	promv1.API

	cmd   *exec.Cmd
	lines strings.Builder // of its log, to be read once it has ended
	ended chan struct{}
}

var listening = regexp.MustCompile(`msg="Listening on" .*\baddress=(\S+)`)

// Start starts a Prometheus and waits until it is ready. It must be stopped.
func Start(ctx context.Context, o Options) (*Server, error) {
	path, err := Program(ctx, o.Root, "prometheus")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(o.Directory, "prometheus.yaml")
	if err := write(config, o.Config); err != nil {
		return nil, err
	}
	s := &Server{ended: make(chan struct{})}
	s.cmd = exec.Command(path, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(o.Directory, "data"), "--web.listen-address=127.0.0.1:0")
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := s.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := within(o.Network, s.cmd.Start); err != nil {
		return nil, fmt.Errorf("starting Prometheus: %w", err)
	}
	ready := make(chan string, 1)
	go func() {
		defer close(s.ended)
		address := ""
		for in := bufio.NewScanner(log); in.Scan(); {
			s.lines.WriteString(in.Text() + "\n")
			if found := listening.FindStringSubmatch(in.Text()); found != nil {
				address = found[1]
			}
			if strings.Contains(in.Text(), "Server is ready") {
				ready <- address
			}
		}
	}()
	select {
	case at := <-ready:
		s.URL = "http://" + at
		return s, s.connect(o.Network)
	case <-s.ended:
	case <-ctx.Done():
	case <-time.After(startsWithin):
	}
	return nil, fmt.Errorf("starting Prometheus: it is not ready: %w", errors.Join(ctx.Err(), s.Stop()))
}

// connect makes clients dial from the network of the server.
func (s *Server) connect(network *os.File) error {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, address string) (conn net.Conn, err error) {
		err = within(network, func() error {
			conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", address)
			return err
		})
		return conn, err
	}}
	client, err := api.NewClient(api.Config{Address: s.URL, RoundTripper: transport})
	if err != nil {
		return errors.Join(fmt.Errorf("connecting to Prometheus: %w", err), s.Stop())
	}
	s.API = promv1.NewAPI(client)
	return nil
}

// Stop ends the server. Its error has the log.
func (s *Server) Stop() error {
	err := s.cmd.Process.Signal(syscall.SIGTERM)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-s.ended
	return failure.Wrap(errors.Join(err, s.cmd.Wait()), "Prometheus: %s", &s.lines)
}

// within calls f in a network namespace; nil: that of this process.
func within(network *os.File, f func() error) error {
	if network == nil {
		return f()
	}
	leave, err := netns.Enter(network)
	if err != nil {
		return err
	}
	return errors.Join(f(), leave())
}
