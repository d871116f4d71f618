package upstream

import "sync"

// Sizes of buffers in bytes: of those that large bodies are copied with, and of those for
// the events of watches.
const (
	BufferSize      = 64 << 10
	SmallBufferSize = 4 << 10
)

// Buf is a pooled buffer. B may be shortened.
type Buf struct{ B []byte }

var (
	buffers      = sync.Pool{New: func() any { return &Buf{B: make([]byte, BufferSize)} }}
	smallBuffers = sync.Pool{New: func() any { return &Buf{B: make([]byte, SmallBufferSize)} }}
)

// Buffer takes a buffer from its pool; Free gives it back.
func Buffer() *Buf { return buffers.Get().(*Buf) }

// SmallBuffer is Buffer for a small one.
func SmallBuffer() *Buf { return smallBuffers.Get().(*Buf) }

// Free gives b back. It must not be used after.
func (b *Buf) Free() {
	b.B = b.B[:cap(b.B)]
	if len(b.B) == SmallBufferSize {
		smallBuffers.Put(b)
		return
	}
	buffers.Put(b)
}

// BufferPool is the pool of buffers for [httputil.ReverseProxy].
type BufferPool struct{}

// Get implements httputil.BufferPool.
func (BufferPool) Get() []byte { return Buffer().B }

// Put implements httputil.BufferPool.
func (BufferPool) Put(b []byte) { (&Buf{B: b}).Free() }
