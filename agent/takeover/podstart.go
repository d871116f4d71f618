package takeover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// ProbeInterval is how often an agent that does not serve asks about the one that does.
const ProbeInterval = time.Second

// podStartFile has the same name in all versions: an upgrade of the agent reads it.
const podStartFile = "born"

// PodStart returns when this agent's pod first started, as time since the node booted:
// that clock cannot be set, and a reboot clears dir, which must be in memory and kept over
// restarts of the container. An agent whose container restarts is as old as its pod.
// With an empty dir, each call is the start of another pod.
func PodStart(dir string) (time.Duration, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0, fmt.Errorf("reading the clock: %w", err)
	}
	if dir == "" {
		return time.Duration(now.Nano()), nil
	}
	path := filepath.Join(dir, podStartFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		b = strconv.AppendInt(nil, now.Nano(), 10)
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		return 0, fmt.Errorf("saving when this pod started: %w", err)
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	return time.Duration(n), failure.Wrap(err, "reading when this pod started, in %s", path)
}

// AwaitPermission waits until an agent whose pod started then may take over from the one
// that serves at path. It reports false if ctx ends first. It changes nothing on the node.
func AwaitPermission(ctx context.Context, path string, podStart time.Duration, logger *slog.Logger) bool {
	logged := ""
	err := wait.PollUntilContextCancel(ctx, ProbeInterval, true, func(ctx context.Context) (bool, error) {
		_, err := Probe(ctx, path, podStart)
		if !errors.Is(err, ErrRefused) {
			return ctx.Err() == nil, nil
		}
		if logged != err.Error() {
			logged = err.Error()
			logger.Warn("waiting for permission to take over: this agent must not serve now", "reason", err)
		}
		return false, nil
	})
	return err == nil
}
