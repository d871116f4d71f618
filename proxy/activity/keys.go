package activity

import (
	"sync"
	"sync/atomic"

	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

// keys has the smallest keys of what was written. A key that is not new takes no lock.
type keys struct {
	slots [sample.Size]atomic.Uint64 // 0: free
	bound atomic.Uint64              // the greatest key, once all slots are used; 0 before

	mu   sync.Mutex
	used int
}

func (k *keys) add(key uint64) {
	if bound := k.bound.Load(); bound != 0 && key >= bound {
		return
	}
	for i := range k.slots {
		switch k.slots[i].Load() {
		case key:
			return
		case 0:
			k.insert(key)
			return
		}
	}
	k.insert(key)
}

// insert adds a key, in place of the greatest if there is no room.
func (k *keys) insert(key uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	last, greatest := 0, uint64(0)
	for i := range k.used {
		at := k.slots[i].Load()
		if at == key {
			return
		}
		if at > greatest {
			last, greatest = i, at
		}
	}
	switch {
	case k.used < len(k.slots):
		last = k.used
		k.used++
	case key >= greatest:
		return
	}
	k.slots[last].Store(key)
	if k.used == len(k.slots) {
		greatest = 0
		for i := range k.slots {
			greatest = max(greatest, k.slots[i].Load())
		}
		k.bound.Store(greatest)
	}
}

func (k *keys) list() (out []uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.used {
		out = append(out, k.slots[i].Load())
	}
	return out
}

func (k *keys) clear() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.slots {
		k.slots[i].Store(0)
	}
	k.used = 0
	k.bound.Store(0)
}
