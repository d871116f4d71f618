package filter

import (
	"math/bits"
	"sync"
)

// stores are pools of buffers, by the number of bits of their size.
var stores [bits.UintSize + 1]sync.Pool

func newStore(size int) []byte {
	if b, ok := stores[bits.Len(uint(size))].Get().(*[]byte); ok && len(*b) == size {
		return *b
	}
	return make([]byte, size)
}

// putStore gives b back. It must not be used after.
func putStore(b []byte) { stores[bits.Len(uint(len(b)))].Put(&b) }
