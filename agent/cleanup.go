package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/capture"
	"github.com/ctrlmesh/ctrlmesh/agent/takeover"
)

// stopWithin is how long a cleanup waits for the running agent to stop.
const stopWithin = 30 * time.Second

// cleaner keeps agents from serving a node while it is cleaned up.
type cleaner struct {
	podStart time.Duration
	done     atomic.Bool
}

// MayTakeOver implements takeover.Incumbent. Once clean, an agent of a later pod may: the
// mesh was installed again.
func (c *cleaner) MayTakeOver(podStart time.Duration) error {
	if !c.done.Load() || podStart < c.podStart {
		return errors.New("this node is being cleaned up")
	}
	return nil
}

// The rest of takeover.Incumbent: there is nothing to offer.
func (c *cleaner) Offer(context.Context) ([]takeover.Pod, error)  { return nil, nil }
func (c *cleaner) Yield(context.Context) (<-chan struct{}, error) { return nil, nil }
func (c *cleaner) Traffic(context.Context) map[string][]byte      { return nil }
func (c *cleaner) Resume(context.Context) error                   { return nil }
func (c *cleaner) Stop(context.Context) error                     { return nil }

// Cleanup removes what agents leave on the node for their successors: redirections,
// policies, the serving certificate. It stops a running agent first, for good. Captured pods
// go direct from then on; those that trust the mesh CA alone reach nothing. Then it calls
// clean. Until that returns, no agent of an earlier pod serves again.
func Cleanup(ctx context.Context, o Options, clean func() error) error {
	stopping, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	if err := takeover.Stop(stopping, o.socket()); err != nil {
		// Most likely it hangs. When it wakes up, it finds that the socket was taken.
		o.Logger.Error("the running agent did not stop", "error", err)
	}
	podStart, err := takeover.PodStart(o.PodDir)
	if err != nil {
		return err
	}
	socket, err := takeover.Listen(o.socket(), o.Logger)
	if err != nil {
		return err
	}
	if err := socket.Take(); err != nil {
		return errors.Join(err, socket.Close())
	}
	c := &cleaner{podStart: podStart}
	served := make(chan struct{})
	go func() { defer close(served); socket.Serve(ctx, c) }()
	if err = o.cleanNode(); err == nil {
		c.done.Store(true)
		err = clean()
	}
	if socket.Current() {
		err = errors.Join(err, os.RemoveAll(filepath.Dir(o.socket())))
	}
	_ = socket.Close() // ctx may have closed it
	<-served
	return err
}

func (o Options) cleanNode() error {
	_, locator, err := o.findPods()
	if err != nil {
		return err
	}
	// All pods, because there may be no record of those that were captured.
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
	errs = append(errs, capture.Cleanup(PinDir(o.BPFDir), paths...))
	for _, dir := range []string{o.StateDir, o.RunDir} {
		errs = append(errs, removeContents(dir, filepath.Dir(o.socket())))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cleaning up this node: %w", err)
	}
	o.Logger.Info("this node is clean", "pods_seen", len(paths))
	return nil
}

// removeContents empties a directory, which may be a mount point, except for one path.
func removeContents(dir, but string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if path := filepath.Join(dir, e.Name()); path != but {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(errs...)
}
