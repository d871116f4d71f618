package admit

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"slices"
	"sync"
)

// errTooLarge and errEvicted are why a body is not read to its end.
var (
	errTooLarge = errors.New("the body is too large")
	errEvicted  = errors.New("the body was dropped: the peer has too many bytes under way")
)

// Bodies bounds the bytes of request bodies that are stored at once.
type Bodies struct {
	// Each bounds one body, Total all of them.
	Each, Total int64

	mu    sync.Mutex
	bytes int64
	peers map[netip.Addr][]*body // oldest first
}

// body is one that is stored. Its fields are guarded by Bodies.mu.
type body struct {
	peer    netip.Addr
	bytes   int64
	limit   int64
	read    bool // to its end: only bodies that are still read are dropped
	evicted bool
	abort   func()
}

// Read reads a body. head is what the request takes besides, which counts too. If the total is
// exceeded, the latest body of the peer with the most bytes is dropped: its abort is called,
// which must end a Read under way without blocking. The caller calls release once it needs the
// body no more.
func (b *Bodies) Read(peer netip.Addr, head int64, r io.Reader, abort func()) (content []byte, release func(), err error) {
	stored := &body{peer: peer, limit: b.Each + head, abort: abort}
	b.add(stored)
	release = sync.OnceFunc(func() { b.drop(stored) })
	if err := b.grow(stored, head); err != nil {
		release()
		return nil, nil, err
	}
	var buffer bytes.Buffer
	_, err = io.Copy(writerFunc(func(p []byte) (int, error) {
		if err := b.grow(stored, int64(len(p))); err != nil {
			return 0, err
		}
		return buffer.Write(p)
	}), r)
	if b.finish(stored) {
		err = errEvicted
	}
	if err != nil {
		release()
		return nil, nil, err
	}
	return buffer.Bytes(), release, nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func (b *Bodies) add(stored *body) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.peers == nil {
		b.peers = map[netip.Addr][]*body{}
	}
	b.peers[stored.peer] = append(b.peers[stored.peer], stored)
}

// grow counts bytes that are about to be stored.
func (b *Bodies) grow(stored *body, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if stored.evicted {
		return errEvicted
	}
	stored.bytes += n
	b.bytes += n
	if stored.bytes > stored.limit {
		return errTooLarge
	}
	for b.bytes > b.Total {
		victim := b.latestOfLargest()
		b.remove(victim)
		victim.evicted = true
		victim.abort()
	}
	if stored.evicted {
		return errEvicted
	}
	return nil
}

// latestOfLargest returns the latest body to drop of the peer with the most bytes among
// those that have one. That of the caller is always one.
func (b *Bodies) latestOfLargest() (latest *body) {
	most := int64(0)
	for _, bodies := range b.peers {
		sum := int64(0)
		var last *body
		for _, o := range bodies {
			if sum += o.bytes; o.bytes > 0 && !o.read {
				last = o
			}
		}
		if last != nil && sum > most {
			most, latest = sum, last
		}
	}
	return latest
}

func (b *Bodies) drop(stored *body) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(stored)
}

// remove ends the count of a body. It is called with mu locked.
func (b *Bodies) remove(stored *body) {
	bodies := b.peers[stored.peer]
	i := slices.Index(bodies, stored)
	if i < 0 {
		return
	}
	b.bytes -= stored.bytes
	if bodies = slices.Delete(bodies, i, i+1); len(bodies) == 0 {
		delete(b.peers, stored.peer)
	} else {
		b.peers[stored.peer] = bodies
	}
}

// finish notes that a body is read no more, and reports whether it was dropped.
func (b *Bodies) finish(stored *body) (evicted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	stored.read = true
	return stored.evicted
}
