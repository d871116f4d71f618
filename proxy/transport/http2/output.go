package http2

import (
	"encoding/binary"
	"math"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

func (o *output) init() {
	o.window, o.initial = initialWindow, initialWindow
}

// outBuffers are pooled: idle connections have none.
var outBuffers = sync.Pool{New: func() any { b := make([]byte, 0, 4<<10); return &b }}

// open returns what frames are appended to.
func (o *output) open() []byte {
	if o.pooled == nil {
		o.pooled = outBuffers.Get().(*[]byte)
		o.b = (*o.pooled)[:0]
	}
	return o.b
}

// take returns the frames that wait, for done.
func (o *output) take() (b []byte, pooled *[]byte) {
	b, pooled = o.b, o.pooled
	o.b, o.pooled, o.replies = nil, nil, 0
	o.batch++
	return b, pooled
}

// done returns what take returned to the pool, unless it has grown too large.
func done(b []byte, pooled *[]byte) {
	if cap(b) <= 2*maxOut {
		*pooled = b
		outBuffers.Put(pooled)
	}
}

// batchesForOthers is how often a handler writes frames before another goroutine goes on.
const batchesForOthers = 4

// flush writes the frames that wait, unless somebody does. The caller has c.mu, which is not locked meanwhile.
func (c *conn) flush() {
	if !c.out.writing {
		c.out.writing = true
		c.write(batchesForOthers)
	}
}

func (c *conn) write(batches int) {
	o := &c.out
	for len(o.b) > 0 && c.err == nil {
		if batches == 0 {
			go c.writeRest()
			return
		}
		batches--
		b, pooled := o.take()
		c.wake()
		c.mu.Unlock()
		_, err := c.nc.Write(b)
		done(b, pooled)
		c.mu.Lock()
		if err != nil {
			go c.close(err) // not here: closing can wait for the client
			break
		}
	}
	if half, ok := c.nc.(interface{ CloseWrite() error }); ok && o.closing && c.err == nil {
		c.mu.Unlock()
		_ = half.CloseWrite()
		c.mu.Lock()
	}
	o.writing = false
}

// wake wakes handlers that wait for a window or for room in the buffer.
func (c *conn) wake() {
	waiting := c.out.waiting
	for i, s := range waiting {
		s.waits = false
		s.changed.Broadcast()
		waiting[i] = nil
	}
	c.out.waiting = waiting[:0]
}

// reply appends frames that reply to those of the client. They are bounded: a client that does not read must not make
// them pile up.
func (c *conn) reply(b []byte) error {
	if c.out.replies += len(b); c.out.replies > maxReplies {
		return &connError{codeCalm, "too many frames without reading"}
	}
	c.out.b = append(c.out.open(), b...)
	c.flushLater()
	return nil
}

// flushLater is flush for the goroutine that reads, which must not wait for the client to read.
func (c *conn) flushLater() {
	if !c.out.writing && len(c.out.b) > 0 {
		c.out.writing = true
		go c.writeRest()
	}
}

func (c *conn) writeRest() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.write(math.MaxInt)
}

// settings appends what the server's side of a connection begins with.
func (c *conn) settings() {
	const count = 3
	b := appendFrame(c.out.open(), typeSettings, 0, 0, 6*count)
	b = appendSetting(b, settingStreams, uint32(c.server.MaxStreams))
	b = appendSetting(b, settingWindow, uint32(c.server.StreamWindow))
	b = appendSetting(b, settingHeaders, uint32(c.server.MaxHeader))
	c.out.b = appendWindowUpdate(b, 0, c.server.ConnWindow-initialWindow)
	c.flush()
}

// room waits until s may send DATA, and returns of how many bytes, at most n. It gives up s after its stall.
func (s *Stream) room(n int) (int, error) {
	o := &s.c.out
	for s.err == nil {
		if n := int(min(int64(n), o.window, s.window, int64(o.fit()))); n > 0 && len(o.b) <= maxOut {
			return n, nil
		}
		s.await()
	}
	return 0, s.err
}

// fit returns how much DATA, with its head, fills the last record of TLS that the frames take. Few bytes more would be
// a record, a system call, and for the client a wake-up of their own.
func (o *output) fit() int {
	const record, least = 16 << 10, 1 << 10
	if free := record - len(o.b)%record - frameHead; free >= least {
		return free
	}
	return record - frameHead
}

// await waits until something has changed. The caller stops the stall when it waits no more.
func (s *Stream) await() {
	if stall := &s.resp.stall; stall.timer == nil {
		stall.set(s, time.Now().Add(s.c.server.Stall()), s.giveUp)
	}
	if c := s.c; len(c.out.b) > 0 && !c.out.writing {
		c.flush()
		return
	}
	if !s.waits {
		s.waits = true
		s.c.out.waiting = append(s.c.out.waiting, s)
	}
	s.changed.Wait()
}

// giveUp resets a stream whose handler waits for too long.
func (s *Stream) giveUp() {
	s.reset(codeInternal, errStalled)
	s.c.flush()
}

// headers appends HEADERS, and CONTINUATION if one frame is not enough. A trailer has no status: 0.
func (c *conn) headers(stream uint32, end bool, status int, fields, more header.Fields) {
	o := &c.out
	o.head = o.head[:0]
	if !o.emptied {
		o.emptied = true
		o.head = append(o.head, emptyTable)
	}
	if status != 0 {
		o.head = appendStatus(o.head, status)
	}
	o.head = appendFields(appendFields(o.head, fields), more)
	kind, flags := uint8(typeHeaders), uint8(0)
	if end {
		flags = flagEndStream
	}
	for rest := o.head; ; {
		n := min(len(rest), maxFrame)
		if n == len(rest) {
			flags |= flagEndHeaders
		}
		o.b = append(appendFrame(o.open(), kind, flags, stream, n), rest[:n]...)
		if rest = rest[n:]; len(rest) == 0 {
			break
		}
		kind, flags = typeContinuation, 0
	}
	if cap(o.head) > maxFrame {
		o.head = nil
	}
}

// appendData appends DATA.
func (o *output) appendData(stream uint32, p []byte, flags uint8) {
	o.b = append(appendFrame(o.open(), typeData, flags, stream, len(p)), p...)
	o.data = min(o.data+updatesPerFrame, futileBurst)
}

// applySettings changes what the client allows.
func (c *conn) applySettings(p []byte) error {
	for ; len(p) >= 6; p = p[6:] {
		value := binary.BigEndian.Uint32(p[2:])
		switch binary.BigEndian.Uint16(p) {
		case settingPush:
			if value > 1 {
				return protocolError("invalid SETTINGS_ENABLE_PUSH")
			}
		case settingWindow:
			if err := c.resize(value); err != nil {
				return err
			}
		case settingFrame:
			if value < maxFrame || value >= 1<<24 {
				return protocolError("invalid SETTINGS_MAX_FRAME_SIZE")
			}
		}
	}
	return nil
}

// resize changes the windows of streams by SETTINGS_INITIAL_WINDOW_SIZE.
func (c *conn) resize(initial uint32) error {
	if initial > maxWindow {
		return &connError{codeFlowControl, "invalid SETTINGS_INITIAL_WINDOW_SIZE"}
	}
	change := int64(initial) - c.out.initial
	c.out.initial = int64(initial)
	for _, s := range c.streams {
		if s.window += change; s.window > maxWindow {
			return &connError{codeFlowControl, "SETTINGS make a window too large"}
		}
	}
	c.wake()
	return nil
}
