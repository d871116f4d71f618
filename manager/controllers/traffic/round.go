package traffic

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/status"
)

// pace limits the writes of one object's status.
type pace struct {
	at time.Time // of the last write
	// last is the object that was written then. It replaced the resource version base.
	last   client.Object
	base   string
	events *rate.Limiter
}

// round is one run of the controller.
type round struct {
	*Controller
	ctx   context.Context
	in    status.TrafficInput
	paces map[types.UID]*pace
	wait  time.Duration // until the next write is due; 0 if there is none
	errs  []error
	// writes are made once all objects have been read.
	writes []statusWrite
	calm   int // number of writes that were made and not urgent
	// opened and injected are numbers of pods, by object.
	opened, injected map[types.NamespacedName]int32
}

// statusWrite is a pending write of an object's status.
type statusWrite struct {
	*pace
	current, updated client.Object
	gap              time.Duration // since the last write; 0 if it is urgent
	written          func()
}

// newest returns the newest state of an object whose spec was compiled, and its pace. The
// pace is nil if the object was deleted, or its spec has changed and will be compiled soon.
// It reads into cached. The object is as it was last written if the cache is older.
func newest[T client.Object](r *round, compiled, cached T) (*pace, T) {
	err := r.Cache.Get(r.ctx, client.ObjectKeyFromObject(compiled), cached)
	if client.IgnoreNotFound(err) != nil {
		r.errs = append(r.errs, err)
	}
	if err != nil || cached.GetUID() != compiled.GetUID() || cached.GetGeneration() != compiled.GetGeneration() {
		return nil, cached
	}
	p := r.Controller.paces[cached.GetUID()]
	if p == nil {
		p = &pace{events: rate.NewLimiter(rate.Every(eventGap), eventBurst)}
	}
	r.paces[cached.GetUID()] = p
	if last, ok := p.last.(T); ok && p.base == cached.GetResourceVersion() {
		return p, last
	}
	return p, cached
}

// write writes a status, unless it is too early or too many others were written.
func (r *round) write(s statusWrite) {
	if wait := s.at.Add(s.gap).Sub(r.in.Now); wait > 0 {
		r.again(wait)
		return
	}
	if s.gap > 0 {
		if r.calm == calmWrites || s.gap == countGap && !r.counts.Allow() {
			r.again(writeRetry)
			return
		}
		r.calm++
	}
	s.at = r.in.Now
	err := r.Client.Status().Update(r.ctx, s.updated)
	switch {
	case apierrors.IsNotFound(err):
	case apierrors.IsConflict(err):
		s.at, s.last = time.Time{}, nil
		r.again(writeRetry) // until the cache has the new version
	case err != nil:
		r.errs = append(r.errs, fmt.Errorf("writing the status of %T %s: %w", s.updated, client.ObjectKeyFromObject(s.updated), err))
	default:
		s.base, s.last = s.current.GetResourceVersion(), s.updated
		s.written()
	}
}

func (r *round) again(wait time.Duration) {
	if r.wait == 0 || wait < r.wait {
		r.wait = wait
	}
}
