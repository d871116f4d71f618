package agent

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/process"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy"
)

// loopWithin is how long the loop may take to do something else first.
const loopWithin = 5 * time.Second

// obituary reports that the processes which wrote a pod's locks last have ended.
//
// The proof: each time one of the locks was written, and so by somebody who ran then, it
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
	Holders() []proxy.Holder
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

// await is called when a lock was written. It is true when it was written again.
func (o *obituary) await() bool {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	holders := o.proxied.Holders()
	var ended <-chan struct{} // nil: it will never be known
	if watch := o.processes(holders); watch != nil {
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
				o.tell(holders)
			}
			done = o.proxied.Done()
		case <-done:
			return false
		}
	}
}

// processes watches all that may have written the locks; nil if they cannot be told.
// Locks that were not written since keep the holder that has ended.
func (o *obituary) processes(holders []proxy.Holder) *process.Watch {
	sandbox, pending := "", true
	o.in(func(mb *member) {
		sandbox, pending = mb.sandbox, !done(o.earlier[o.uid]) || time.Now().Before(o.strangers)
		mb.dead = slices.DeleteFunc(mb.dead, func(d *meshv1.DeadHolder) bool {
			return !slices.ContainsFunc(holders, func(h proxy.Holder) bool { return proto.Equal(d, deadHolder(h)) })
		})
	})
	nobody := !slices.ContainsFunc(holders, func(h proxy.Holder) bool { return h.Identity != "" })
	if nobody || sandbox == "" || pending {
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

func deadHolder(h proxy.Holder) *meshv1.DeadHolder {
	return &meshv1.DeadHolder{Namespace: h.Namespace, Name: h.Name, Identity: h.Identity, ResourceVersion: h.Version}
}

func (o *obituary) tell(holders []proxy.Holder) {
	var dead []*meshv1.DeadHolder
	for _, h := range holders {
		if h.Identity != "" {
			dead = append(dead, deadHolder(h))
		}
	}
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
