package http2

import (
	"encoding/binary"
	"net/http"
)

// receive handles a frame.
func (c *conn) receive(f *frame) error {
	if c.in.block.open() && (f.kind != typeContinuation || f.stream != c.in.block.stream) {
		return protocolError("a header block was interrupted")
	}
	if err := f.check(); err != nil {
		return err
	}
	switch f.kind {
	case typeData:
		return c.receiveData(f)
	case typeHeaders:
		return c.receiveHeaders(f)
	case typeContinuation:
		return c.receiveContinuation(f)
	case typePriority:
		return c.receivePriority(f)
	case typeReset:
		return c.receiveReset(f)
	case typeSettings:
		return c.receiveSettings(f)
	case typePushPromise:
		return protocolError("PUSH_PROMISE from a client")
	case typePing:
		return c.receivePing(f)
	case typeGoAway:
		return c.receiveGoAway(f)
	case typeWindowUpdate:
		return c.receiveWindowUpdate(f)
	default:
		return c.futile()
	}
}

// futile counts a frame that advances no request.
func (c *conn) futile() error {
	if !c.in.futile.Allow() {
		return &connError{codeCalm, "too many frames that advance no request"}
	}
	return nil
}

func (c *conn) receivePriority(f *frame) error {
	if binary.BigEndian.Uint32(f.payload)&maxStreamID == f.stream {
		return &streamError{f.stream, codeProtocol}
	}
	return c.futile()
}

func (c *conn) receiveSettings(f *frame) error {
	if f.has(flagAck) && len(f.payload) > 0 || len(f.payload)%6 != 0 {
		return frameSizeError("invalid size of SETTINGS")
	}
	if err := c.futile(); err != nil || f.has(flagAck) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.applySettings(f.payload); err != nil {
		return err
	}
	return c.reply(appendFrame(nil, typeSettings, flagAck, 0, 0))
}

func (c *conn) receivePing(f *frame) error {
	if err := c.futile(); err != nil || f.has(flagAck) {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.reply(append(appendFrame(nil, typePing, flagAck, 0, 8), f.payload...))
}

// receiveGoAway is from a client that sends no further request.
func (c *conn) receiveGoAway(f *frame) error {
	if len(f.payload) < 8 {
		return frameSizeError("invalid size of GOAWAY")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.goAway()
	c.flushLater()
	return c.futile()
}

func (c *conn) receiveWindowUpdate(f *frame) error {
	more := int64(binary.BigEndian.Uint32(f.payload) & maxWindow)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out.data > 0 {
		c.out.data--
	} else if err := c.futile(); err != nil {
		return err
	}
	if f.stream == 0 {
		if c.out.window += more; more == 0 {
			return protocolError("WINDOW_UPDATE of nothing")
		} else if c.out.window > maxWindow {
			return &connError{codeFlowControl, "window too large"}
		}
		c.wake()
		return nil
	}
	s := c.streams[f.stream]
	switch {
	case s == nil: // it may have been on its way when the stream ended
		return c.idleStream(f.stream)
	case more == 0:
		return &streamError{f.stream, codeProtocol}
	}
	if s.window += more; s.window > maxWindow {
		return &streamError{f.stream, codeFlowControl}
	}
	s.changed.Broadcast()
	return nil
}

func (c *conn) receiveReset(f *frame) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.streams[f.stream]; s != nil {
		s.drop(errReset)
		c.leave()
		c.flushLater()
	} else if err := c.idleStream(f.stream); err != nil {
		return err
	}
	return c.futile()
}

// idleStream returns an error if a stream has not begun. After GOAWAY it may have, for the client.
func (c *conn) idleStream(id uint32) error {
	if id > c.last && !c.away {
		return protocolError("a frame of an idle stream")
	}
	return nil
}

// receiveData appends DATA to the body of a request.
func (c *conn) receiveData(f *frame) error {
	size := len(f.payload)
	if err := f.unpad(); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.window.receive(size) {
		return &connError{codeFlowControl, "more DATA than the connection's window"}
	}
	defer c.flushLater()
	s := c.streams[f.stream]
	if s == nil || s.body.whole {
		c.consume(nil, size)
		if err := c.idleStream(f.stream); err != nil || f.stream > c.last {
			return err
		}
		return &streamError{f.stream, codeStreamClosed}
	}
	if !s.body.window.receive(size) {
		c.consume(nil, size)
		return &streamError{f.stream, codeFlowControl}
	}
	c.consume(s, size-len(f.payload))
	if err := s.body.append(f.payload); err != nil {
		return err
	}
	if f.has(flagEndStream) {
		return s.body.finish()
	}
	if len(f.payload) == 0 {
		return c.futile()
	}
	return nil
}

// resetStream sends RST_STREAM.
func (c *conn) resetStream(e *streamError) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.streams[e.stream]; s != nil {
		s.drop(e)
		c.leave()
	}
	if err := c.futile(); err != nil {
		return err
	}
	return c.reply(appendReset(nil, e.stream, e.code))
}

func (c *conn) receiveHeaders(f *frame) error {
	if f.stream%2 == 0 {
		return protocolError("HEADERS of a stream of the server")
	}
	if err := f.unpad(); err != nil {
		return err
	}
	c.in.block.begin(f.stream, f.has(flagEndStream))
	return c.receiveBlock(f)
}

func (c *conn) receiveContinuation(f *frame) error {
	if !c.in.block.open() {
		return protocolError("CONTINUATION without HEADERS")
	}
	return c.receiveBlock(f)
}

// receiveBlock reads a part of a header block. After the last one it begins a stream, or ends the body of one.
func (c *conn) receiveBlock(f *frame) error {
	b := &c.in.block
	if err := b.read(f.payload, f.has(flagEndHeaders)); err != nil || b.open() {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil { // a write has failed
		return c.err
	}
	if s := c.streams[b.stream]; s != nil {
		return s.receiveTrailer(b)
	}
	if b.stream <= c.last {
		return c.oldStream(b.stream)
	}
	if c.away { // the client sees that it was not served
		return nil
	}
	c.last = b.stream
	if len(c.streams) >= c.server.MaxStreams || c.running >= 2*c.server.MaxStreams {
		return c.refuseStream(b.stream, codeRefusedStream)
	}
	if b.large {
		return c.tooLarge(b)
	}
	s := c.newStream(b)
	if s == nil {
		return c.refuseStream(b.stream, codeProtocol)
	}
	c.streams[s.id] = s
	c.start(s)
	return nil
}

// refuseStream refuses a stream that is not served.
func (c *conn) refuseStream(id uint32, code code) error {
	c.ended.add(id, true)
	return &streamError{id, code}
}

// tooLarge refuses a request whose head is too large.
func (c *conn) tooLarge(b *block) error {
	if err := c.futile(); err != nil {
		return err
	}
	c.ended.add(b.stream, true)
	before := len(c.out.b)
	c.headers(b.stream, true, http.StatusRequestHeaderFieldsTooLarge, nil, nil)
	c.out.replies += len(c.out.b) - before
	var reset []byte
	if !b.end {
		reset = appendReset(nil, b.stream, codeNo)
	}
	return c.reply(reset)
}

// oldStream returns the error of HEADERS of a stream that does not exist any more, or never did.
func (c *conn) oldStream(id uint32) error {
	if c.ended.has(id, false) {
		return &connError{codeStreamClosed, "HEADERS of a closed stream"}
	}
	if c.ended.has(id, true) {
		return &streamError{id, codeStreamClosed}
	}
	return protocolError("HEADERS of a stream before the last one")
}

// closedStreams are the last streams that ended: frames of those that were reset can be on their way.
type closedStreams struct {
	streams [64]struct {
		id    uint32
		reset bool
	}
	next int
}

func (e *closedStreams) add(id uint32, reset bool) {
	e.streams[e.next].id, e.streams[e.next].reset = id, reset
	e.next = (e.next + 1) % len(e.streams)
}

func (e *closedStreams) has(id uint32, reset bool) bool {
	for _, s := range e.streams {
		if s.id == id {
			return s.reset == reset
		}
	}
	return false
}
