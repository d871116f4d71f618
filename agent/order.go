package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/handover"
)

const (
	// knockInterval is how often an agent that must not serve asks whether it may.
	knockInterval = time.Second
	// aloneWithin is how long nobody may serve after a hand-over: the container of
	// a successor that ends is started anew sooner, as a rule.
	aloneWithin = 5 * time.Second
)

// born is when this agent's pod first started, by the clock that runs since the
// node did: nobody sets that, and the file is gone when it starts anew. An agent
// whose container is restarted is as old as its pod.
func (o Options) born() (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, fmt.Errorf("reading the clock: %w", err)
	}
	if o.PodDir == "" {
		return time.Duration(now.Nano()), nil
	}
	path := filepath.Join(o.PodDir, "born")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		b = strconv.AppendInt(nil, now.Nano(), 10)
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		return 0, fmt.Errorf("remembering when this pod started: %w", err)
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading when this pod started, in %s: %w", path, err)
	}
	return time.Duration(n), nil
}

// admitted waits until an agent may take over from whom it finds. It is false when
// ctx ends before. Nothing of the node was touched until then.
func (o Options) admitted(ctx context.Context, born time.Duration) bool {
	said := ""
	for ctx.Err() == nil {
		_, err := handover.Knock(ctx, o.socket(), born)
		if !errors.Is(err, handover.ErrRefused) {
			return ctx.Err() == nil
		}
		if said != err.Error() {
			said = err.Error()
			o.Logger.Warn("waiting: this agent must not serve now", "reason", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(knockInterval):
		}
	}
	return false
}

// Admit implements handover.Holder: between two agents, the one of the later pod
// is the one that stays.
func (h holder) Admit(born time.Duration) error {
	if born < h.born {
		return errors.New("an agent whose pod started later serves: this one is to end")
	}
	return nil
}

// watchSuccessor returns an error when the agent that took over is gone, until ctx
// ends: started anew, this one serves again. One that was told to stop does not.
func (m *mesh) watchSuccessor(ctx context.Context, path string) error {
	select {
	case <-m.yielded:
	case <-ctx.Done():
		return nil
	}
	ticker := time.NewTicker(knockInterval)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
		if there, _ := handover.Knock(ctx, path, m.born); there {
			last = time.Now()
		}
		if time.Since(last) < aloneWithin {
			continue
		}
		idle := false
		if err := m.do(ctx, func() error { idle = m.phase == yielded && m.draining == 0; return nil }); err == nil && idle {
			return errors.New("the agent that took over is gone: starting anew, to serve again")
		}
	}
}
