package control

import (
	"context"
	"sync"

	"github.com/ctrlmesh/ctrlmesh/agent/inflight"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// acks delays the acks of one stream until they are true. The acks of one pod are sent in
// order, and at most two of them wait: an ack includes all that earlier ones confirm.
type acks struct {
	out chan *meshv1.Ack

	mu      sync.Mutex
	waiting map[string][]answer // by pod uid; an entry has a goroutine
}

type answer struct {
	ack     *meshv1.Ack
	settled <-chan struct{} // nil: settled
}

func newAcks() *acks {
	return &acks{out: make(chan *meshv1.Ack, 64), waiting: map[string][]answer{}}
}

// add sends an ack once settled is closed and the earlier acks of the pod were sent.
func (a *acks) add(ctx context.Context, ack *meshv1.Ack, settled <-chan struct{}) {
	uid := ack.GetUid()
	a.mu.Lock()
	waiting, busy := a.waiting[uid]
	if !busy && inflight.Closed(settled) {
		a.mu.Unlock()
		select {
		case a.out <- ack:
		case <-ctx.Done():
		}
		return
	}
	defer a.mu.Unlock()
	if n := len(waiting); ack.GetError() == "" {
		waiting = nil
	} else if n > 0 && waiting[n-1].ack.GetError() != "" {
		waiting = waiting[:n-1]
	}
	a.waiting[uid] = append(waiting, answer{ack, settled})
	if !busy {
		go a.send(ctx, uid)
	}
}

// send sends the acks of a pod until none waits.
func (a *acks) send(ctx context.Context, uid string) {
	for {
		first, ok := a.first(uid)
		if !ok {
			return
		}
		if first.settled != nil {
			select {
			case <-first.settled:
			case <-ctx.Done():
				return
			}
		}
		if !a.take(uid, first) {
			continue // a later one includes it
		}
		select {
		case a.out <- first.ack:
		case <-ctx.Done():
			return
		}
	}
}

func (a *acks) first(uid string) (answer, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting[uid]) == 0 {
		delete(a.waiting, uid)
		return answer{}, false
	}
	return a.waiting[uid][0], true
}

func (a *acks) take(uid string, first answer) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.waiting[uid]; len(w) > 0 && w[0].ack == first.ack {
		a.waiting[uid] = w[1:]
		return true
	}
	return false
}
