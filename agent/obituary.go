package agent

import (
	"context"
	"time"

	"github.com/ctrlmesh/ctrlmesh/agent/process"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// strangersUntil is how long after this agent's start there may be writes under way
// of a pod that it knows nothing of: those that the agent before it let through, and
// those that went direct while there was none.
const strangersUntil = endWithin + proxy.LostWrite

// loopWithin is how long the loop may take to do something else first.
const loopWithin = 5 * time.Second

// obituary tells that whoever wrote a pod's lock last has ended.
//
// The proof: each time the lock was written, and so by somebody who ran then, it
// takes note of all processes of the pod's containers; when these have all ended, so
// has he. All, because whose connection it was does not tell who wrote: one container
// may speak for another. So a pod has not ended of which a container lives on.
type obituary struct {
	*mesh
	uid     string
	proxied lockWriter
}

// lockWriter is a *proxy.Pod.
type lockWriter interface {
	Holder() proxy.Holder
	HolderWritten() <-chan struct{}
	Quiet(context.Context) error
	Done() <-chan struct{}
}

// run ends when the pod is let go of and nothing is left to be told.
func (o *obituary) run() {
	select {
	case <-o.proxied.HolderWritten():
	case <-o.proxied.Done():
		return
	}
	for o.await() {
	}
}

// await is called when the lock was written. It is true when it was written again.
func (o *obituary) await() bool {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	holder := o.proxied.Holder()
	var ended <-chan struct{} // nil: it will never be known
	if watch := o.processes(holder); watch != nil {
		defer watch.Close()
		ended = watch.Ended()
	}
	quiet := make(chan error, 1)
	done := o.proxied.Done()
	for {
		select {
		case <-o.proxied.HolderWritten():
			return true
		case <-ended:
			ended, done = nil, nil
			go func() { quiet <- o.proxied.Quiet(ctx) }()
		case err := <-quiet:
			if err != nil {
				o.logger.Error("nobody is told that the holder of a lock has ended", "uid", o.uid, "error", err)
			} else {
				o.tell(&meshv1.DeadHolder{Identity: holder.Identity, ResourceVersion: holder.Version})
			}
			done = o.proxied.Done()
		case <-done:
			return false
		}
	}
}

// processes watches all that may have written the lock; nil if they cannot be told.
func (o *obituary) processes(h proxy.Holder) *process.Watch {
	sandbox := ""
	o.in(func(mb *member) { mb.dead, sandbox = nil, mb.sandbox })
	if h.Identity == "" || sandbox == "" || time.Since(o.started) < strangersUntil {
		return nil
	}
	pids, err := o.locator.Processes(o.uid, sandbox)
	if err == nil && len(pids) == 0 {
		return nil
	}
	var watch *process.Watch
	if err == nil {
		watch, err = process.New(pids)
	}
	if err != nil {
		o.logger.Error("it will not be seen when the holder of a lock ends", "uid", o.uid, "error", err)
		return nil
	}
	return watch
}

func (o *obituary) tell(dead *meshv1.DeadHolder) {
	o.in(func(mb *member) {
		mb.dead = dead
		o.logger.Info("the holder of a lock has ended", "pod", mb.pod.String())
	})
}

// in calls f in the loop, if the pod is still known.
func (o *obituary) in(f func(*member)) {
	ctx, cancel := context.WithTimeout(context.Background(), loopWithin)
	defer cancel()
	_ = o.do(ctx, func() error {
		if mb := o.members[o.uid]; mb != nil {
			f(mb)
		}
		return nil
	})
}
