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

// pace of writing about one object.
type pace struct {
	at time.Time // of the last write
	// last is what was written then, in the place of what has version base.
	last   client.Object
	base   string
	events *rate.Limiter
}

// newest is an object as it is, if the cache has it but as it was before the last write.
func newest[T client.Object](p *pace, cached T) T {
	if last, ok := p.last.(T); ok && p.base == cached.GetResourceVersion() {
		return last
	}
	return cached
}

// round is one run of the controller.
type round struct {
	*Controller
	ctx   context.Context
	in    status.TrafficInput
	paces map[types.UID]*pace
	wait  time.Duration // until there is more to write; 0 for ever
	errs  []error
	// writes are to be made, once all objects are looked at.
	writes []statusWrite
	calm   int // that were made and were not urgent
	// opened and injected are numbers of pods, by object.
	opened, injected map[types.NamespacedName]int32
}

// statusWrite is one of an object's status.
type statusWrite struct {
	*pace
	current, updated client.Object
	gap              time.Duration // 0: it is urgent
	written          func()
}

func (r *round) pace(uid types.UID) *pace {
	p := r.Controller.paces[uid]
	if p == nil {
		p = &pace{events: rate.NewLimiter(rate.Every(eventGap), eventBurst)}
	}
	r.paces[uid] = p
	return p
}

// current reads the newest state of an object whose spec was compiled, and reports
// whether there is one.
func (r *round) current(compiled, into client.Object) bool {
	err := r.Cache.Get(r.ctx, client.ObjectKeyFromObject(compiled), into)
	if client.IgnoreNotFound(err) != nil {
		r.errs = append(r.errs, err)
	}
	// If it is another one, it will be compiled soon.
	return err == nil && into.GetUID() == compiled.GetUID() && into.GetGeneration() == compiled.GetGeneration()
}

// write writes a status unless it is too early, or others have their turn.
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
		r.again(writeRetry) // the cache will have it
	case err != nil:
		r.errs = append(r.errs, fmt.Errorf("status of %T %s: %w", s.updated, client.ObjectKeyFromObject(s.updated), err))
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
