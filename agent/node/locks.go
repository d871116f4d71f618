package node

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/lockwatch"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// loopTimeout bounds the wait for the loop to finish what it does.
const loopTimeout = 5 * time.Second

// lockRecorder implements lockwatch.Recorder for one pod.
type lockRecorder struct {
	*core
	uid string
}

// watchLocks reports holders of the pod's locks that exit, until the pod is released.
func (c *core) watchLocks(uid string, writer lockwatch.Writer) {
	w := lockwatch.Watch{UID: uid, Writer: writer, Recorder: lockRecorder{c, uid}, Processes: c.Locator.Processes, Logger: c.Logger}
	w.Run()
}

// Written implements lockwatch.Recorder. Writes in flight of earlier agents may be those
// of another process.
func (r lockRecorder) Written(holders []lock.Holder) (sandbox string, alone bool) {
	r.in(func(p *pod) {
		sandbox = p.sandbox
		alone = r.earlier.Ended(r.uid) && !time.Now().Before(r.earlier.UnknownUntil)
		p.reporting.exited = slices.DeleteFunc(p.reporting.exited, func(d *meshv1.DeadHolder) bool {
			return !slices.ContainsFunc(holders, func(h lock.Holder) bool { return proto.Equal(d, lockwatch.DeadHolder(h)) })
		})
	})
	return sandbox, alone
}

// Exited implements lockwatch.Recorder.
func (r lockRecorder) Exited(dead []*meshv1.DeadHolder) {
	r.in(func(p *pod) {
		p.reporting.exited = dead
		r.Logger.Info("the holder of a lock has exited", "pod", p.info.String())
	})
}

// in calls f in the loop, if the pod is still known.
func (r lockRecorder) in(f func(*pod)) {
	ctx, cancel := context.WithTimeout(context.Background(), loopTimeout)
	defer cancel()
	r.with(ctx, r.uid, f)
}
