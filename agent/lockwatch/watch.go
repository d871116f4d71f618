// Package lockwatch reports lock holders that have exited, so that another replica need
// not wait for the lock to expire.
//
// The proof: at each write of one of the pod's locks, and so while the writer runs, the
// watch collects all processes of the pod's containers. When all of them have exited, the
// writer has too. All are required, because the connection does not show which process wrote:
// one container may forward requests of another. A pod of which one container still runs
// therefore proves nothing.
package lockwatch

import (
	"context"
	"log/slog"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// Writer is the proxy of a pod that may write locks: a *proxy.Pod.
type Writer interface {
	Holders() []lock.Holder
	HolderWritten() <-chan struct{}
	Quiet(context.Context) error
	Done() <-chan struct{}
}

// Recorder keeps the lock holders of one pod that have exited.
type Recorder interface {
	// Written is called with the last writes of all locks when one of them was written. The
	// recorder drops exited holders whose lock was written since. It returns the name of the
	// sandbox that the writer runs in, "" if that is not certain. It is not alone if writes of
	// processes that an earlier agent served may be in flight.
	Written(holders []lock.Holder) (sandbox string, alone bool)
	// Exited is called when these holders have exited and no write of theirs is in flight.
	Exited([]*meshv1.DeadHolder)
}

// Watch watches the locks of one pod.
type Watch struct {
	UID      string
	Writer   Writer
	Recorder Recorder
	// Processes returns the pids of the containers of a pod in a sandbox; "": it is to be found.
	Processes func(uid, sandbox string) ([]int, error)
	Logger    *slog.Logger
}

// Run returns when the writer is done and nothing is left to report.
func (w *Watch) Run() {
	select {
	case <-w.Writer.HolderWritten():
	case <-w.Writer.Done():
		return
	}
	for w.await() {
	}
}

// await handles one write of a lock. It reports whether a lock was written again.
func (w *Watch) await() bool {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	holders := w.Writer.Holders()
	var exited <-chan struct{} // nil: unknown for good
	if watch := w.watchWriters(holders); watch != nil {
		defer watch.Close()
		exited = watch.exited
	}
	quiet := make(chan error, 1)
	done := w.Writer.Done()
	for {
		select {
		case <-w.Writer.HolderWritten():
			return true
		case <-exited:
			exited, done = nil, nil
			go func() { quiet <- w.Writer.Quiet(ctx) }()
		case err := <-quiet:
			if err != nil {
				w.Logger.Error("failed to report that the holder of a lock exited", "uid", w.UID, "error", err)
			} else {
				w.Recorder.Exited(deadHolders(holders))
			}
			done = w.Writer.Done()
		case <-done:
			return false
		}
	}
}

// watchWriters watches all processes that may have written the locks. It returns nil if
// they are not known, or if no lock is held.
func (w *Watch) watchWriters(holders []lock.Holder) *exitWatch {
	sandbox, alone := w.Recorder.Written(holders)
	if len(deadHolders(holders)) == 0 || !alone {
		return nil
	}
	pids, err := w.Processes(w.UID, sandbox)
	if err == nil && len(pids) == 0 {
		return nil
	}
	var watch *exitWatch
	if err == nil {
		watch, err = watchExits(pids)
	}
	if err != nil {
		w.Logger.Error("failed to watch the holder of a lock: its exit is not reported", "uid", w.UID, "error", err)
		return nil
	}
	return watch
}

// DeadHolder returns a last write as it is reported once its holder has exited.
func DeadHolder(h lock.Holder) *meshv1.DeadHolder {
	return &meshv1.DeadHolder{Namespace: h.Namespace, Name: h.Name, Identity: h.Identity, ResourceVersion: h.Version, Resource: h.Resource}
}

// deadHolders omits locks without a holder.
func deadHolders(holders []lock.Holder) (dead []*meshv1.DeadHolder) {
	for _, h := range holders {
		if h.Identity != "" {
			dead = append(dead, DeadHolder(h))
		}
	}
	return dead
}
