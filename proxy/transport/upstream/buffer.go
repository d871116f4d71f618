package upstream

import "sync"

// BufferSize is the size of the buffers that large bodies are copied with, in bytes.
const BufferSize = 64 << 10

// Buf is a pooled buffer. B may be shortened.
type Buf struct{ B []byte }

var buffers = sync.Pool{New: func() any { return &Buf{B: make([]byte, BufferSize)} }}

// Buffer takes a buffer from the pool; Free gives it back.
func Buffer() *Buf { return buffers.Get().(*Buf) }

// Free gives b back. It must not be used after.
func (b *Buf) Free() {
	b.B = b.B[:cap(b.B)]
	buffers.Put(b)
}

// BufferPool is the pool of buffers for [httputil.ReverseProxy].
type BufferPool struct{}

// Get implements httputil.BufferPool.
func (BufferPool) Get() []byte { return Buffer().B }

// Put implements httputil.BufferPool.
func (BufferPool) Put(b []byte) { (&Buf{B: b}).Free() }
