package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// manager is a replica of the manager, at an address of its own.
type manager struct {
	address string
	command *exec.Cmd
	log     *os.File
}

// startManager starts the n-th replica, with the memory limit that the documentation names for such a cluster, and waits until it is ready.
func (r *run) startManager(ctx context.Context, n int) (*manager, error) {
	m := &manager{address: fmt.Sprintf("198.18.0.%d", n)}
	var err error
	if m.log, err = os.Create(filepath.Join(r.logs, fmt.Sprintf("manager-%d.log", n))); err != nil {
		return nil, err
	}
	m.command = exec.Command(r.program, "--kubeconfig", r.kubeconfig, "--namespace", kube.SystemNamespace,
		"--pod-name", fmt.Sprintf("%s-%d", kube.ManagerName, n), "--pod-ip", m.address, "--push-address", m.address+":8443",
		"--webhook-port", strconv.Itoa(9442+n), "--metrics-address", m.address+":8080", "--health-address", m.address+":8081")
	m.command.Env = append(os.Environ(), "GOMEMLIMIT=768MiB")
	m.command.Stdout, m.command.Stderr = m.log, m.log
	if err := m.command.Start(); err != nil {
		return nil, fmt.Errorf("starting the manager: %w", err)
	}
	return m, kube.UntilWithin(ctx, patience, "a replica to be ready", func(ctx context.Context) error {
		_, err := get(ctx, "http://"+m.address+":8081/readyz")
		return err
	})
}

// kill ends the process without notice.
func (m *manager) kill() {
	_ = m.command.Process.Kill()
	_ = m.command.Wait()
	m.log.Close()
}

// state is what a process has used.
type state struct {
	at       time.Time
	cpu      time.Duration
	resident int64 // bytes
}

func (m *manager) state() (state, error) {
	pid := m.command.Process.Pid
	cpu, err := stats.ProcessorTime(pid)
	if err != nil {
		return state{}, err
	}
	memory, err := stats.MemoryOf(pid)
	return state{time.Now(), cpu, memory.Resident}, err
}

// cores returns how many processors a process used since then.
func (s state) cores(since state) float64 {
	return (s.cpu - since.cpu).Seconds() / s.at.Sub(since.at).Seconds()
}

// reviews returns how many TokenReviews the apiserver has answered.
func (r *run) reviews(ctx context.Context) (int, error) {
	text, err := r.Clientset.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("reading the apiserver's metrics: %w", err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	return int(kube.Total(families["apiserver_request_total"], map[string]string{"resource": "tokenreviews"})), failure.Wrap(err, "reading the apiserver's metrics")
}

func get(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(string(text))
	}
	return text, err
}
