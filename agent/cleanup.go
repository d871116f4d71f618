package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
)

// Cleanup removes from the node what agents leave there on purpose between
// their lives: redirections, policies, the serving certificate. Pods captured
// until now go direct; those that trust the mesh CA alone then reach nothing.
func Cleanup(o Options) error {
	_, locator, store, err := o.openNode()
	if err != nil {
		return err
	}
	_, saved, err := store.Load()
	errs := []error{err}
	captured := map[string]bool{}
	for _, p := range saved {
		captured[p.GetUid()] = true
	}
	processes, err := locator.Processes(captured)
	errs = append(errs, err)
	var paths []string
	for uid, pids := range processes {
		ns, err := locator.Open(uid, pids)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if ns != nil {
			defer ns.Close()
			paths = append(paths, ns.Path())
		}
	}
	errs = append(errs, capture.Cleanup(capture.Config{PinDir: PinDir(o.BPFDir), Logger: o.Logger}, paths...))
	for _, dir := range []string{o.StateDir, o.RunDir} {
		errs = append(errs, removeContents(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cleaning up this node: %w", err)
	}
	o.Logger.Info("this node is clean", "pods_released", len(paths))
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
