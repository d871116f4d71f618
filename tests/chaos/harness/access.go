package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
)

// accessLog has the access lines of all agents, also of those that have exited.
type accessLog struct {
	root string

	mu     sync.Mutex
	lines  []audit.Access
	failed error
}

// follow reads the agents' logs until ctx ends. The logs of an agent that is replaced are
// deleted some seconds later.
func (a *accessLog) follow(ctx context.Context) {
	logs := Follower{Pattern: filepath.Join(a.root, ".run", "*", "pods", kube.SystemNamespace+"_"+kube.AgentName+"-*", "*", "*.log*")}
	for {
		err := logs.Read(func(text []byte) error {
			lines, err := audit.AccessLines(bytes.NewReader(text))
			a.mu.Lock()
			defer a.mu.Unlock()
			a.lines = append(a.lines, lines...)
			return err
		})
		if err != nil {
			a.mu.Lock()
			a.failed = err
			a.mu.Unlock()
		}
		if kube.Sleep(ctx, 200*time.Millisecond) != nil {
			return
		}
	}
}

// missing returns the requests that have no access line.
func (a *accessLog) missing(requests []audit.Request) ([]audit.Request, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(requests) > 0 && len(a.lines) == 0 && a.failed == nil {
		return nil, errors.New("the agents' logs have no access lines: do the agents log at debug level (make install)?")
	}
	return audit.Leaked(requests, a.lines), a.failed
}

// Leaks returns the requests that have no access line after some seconds, so that no agent
// passed them. It excludes requests that were sent to the mesh and were in flight when an
// agent was killed. sentToMesh reports whether a request was sent to the mesh alone.
func (w *Testbed) Leaks(ctx context.Context, requests []audit.Request, kills []time.Time, sentToMesh func(id string) bool) ([]audit.Request, error) {
	var leaked, cut []audit.Request
	var failed error
	ctx, cancel := context.WithTimeout(ctx, kube.LogDelay)
	defer cancel()
	_ = kube.Until(ctx, "access lines", func(context.Context) error {
		missing, err := w.access.missing(requests)
		if failed = err; err != nil {
			return kube.Never(err)
		}
		if leaked, cut = audit.CutOff(missing, kills, sentToMesh); len(leaked) > 0 {
			return fmt.Errorf("%d are missing", len(leaked))
		}
		return nil
	})
	if len(cut) > 0 {
		w.Logf("  %d requests were in the hands of an agent when it was killed", len(cut))
	}
	LogSome(w, 3, "  ! leaked: %s", leaked)
	return leaked, failed
}
