package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/handover"
)

// stopWithin is how long a cleanup waits for the running agent to stop.
const stopWithin = 30 * time.Second

// Cleanup removes from the node what agents leave there on purpose between
// their lives: redirections, policies, the serving certificate. A running agent
// is told to stop first, for good. Pods captured until now go direct; those that
// trust the mesh CA alone then reach nothing.
func Cleanup(ctx context.Context, o Options) error {
	stopping, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	if err := handover.Stop(stopping, o.socket()); err != nil {
		// It hangs, most likely.
		o.Logger.Error("the running agent may undo the cleanup: end it, and clean up again", "error", err)
	}
	_, locator, err := o.openNode()
	if err != nil {
		return err
	}
	// All pods: which were captured, nobody need have kept.
	found, err := locator.All()
	errs := []error{err}
	var paths []string
	for uid, f := range found {
		ns, err := locator.Open(uid, f.PIDs, false, 0)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if ns == nil {
			continue
		}
		defer ns.Close()
		paths = append(paths, ns.Path())
	}
	errs = append(errs, capture.Cleanup(capture.Config{PinDir: PinDir(o.BPFDir), Logger: o.Logger}, paths...))
	for _, dir := range []string{o.StateDir, o.RunDir} {
		errs = append(errs, removeContents(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cleaning up this node: %w", err)
	}
	o.Logger.Info("this node is clean", "pods_seen", len(paths))
	return nil
}

// removeContents empties a directory that may be a mount point.
func removeContents(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return errors.Join(errs...)
}
