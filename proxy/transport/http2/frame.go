package http2

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Types of frames: RFC 9113, section 6.
const (
	typeData = iota
	typeHeaders
	typePriority
	typeReset
	typeSettings
	typePushPromise
	typePing
	typeGoAway
	typeWindowUpdate
	typeContinuation
)

// Flags of frames. flagAck has the bit of flagEndStream.
const (
	flagEndStream  = 0x1
	flagAck        = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20
)

// Identifiers of settings.
const (
	settingTableSize = 1 + iota
	settingPush
	settingStreams
	settingWindow
	settingFrame
	settingHeaders
)

const (
	frameHead = 9
	flagsAt   = 4 // in it
	// maxFrame is of payloads: the least that SETTINGS_MAX_FRAME_SIZE may allow.
	maxFrame      = 16 << 10
	initialWindow = 1<<16 - 1
	maxWindow     = 1<<31 - 1
	maxStreamID   = 1<<31 - 1
)

// code is an error code: RFC 9113, section 7.
type code uint32

const (
	codeNo code = iota
	codeProtocol
	codeInternal
	codeFlowControl
	codeSettingsTimeout
	codeStreamClosed
	codeFrameSize
	codeRefusedStream
	codeCancel
	codeCompression
	codeConnect
	codeCalm
)

// connError ends a connection.
type connError struct {
	code code
	why  string
}

func (e *connError) Error() string {
	return fmt.Sprintf("HTTP/2 connection: %s (code %d)", e.why, e.code)
}

// streamError ends a stream.
type streamError struct {
	stream uint32
	code   code
}

func (e *streamError) Error() string {
	return fmt.Sprintf("HTTP/2 stream %d: code %d", e.stream, e.code)
}

func protocolError(why string) error { return &connError{codeProtocol, why} }

func frameSizeError(why string) error { return &connError{codeFrameSize, why} }

// frame is a frame that was received.
type frame struct {
	kind    uint8
	flags   uint8
	stream  uint32
	payload []byte // valid until the next frame is read
}

func (f *frame) has(flag uint8) bool { return f.flags&flag != 0 }

// frameBuffer is the size of a connection's buffer. Most frames fit, and most connections are at rest.
const frameBuffer = 4 << 10

// longFrames are buffers for the payloads of longer ones.
var longFrames = sync.Pool{New: func() any { return new([maxFrame]byte) }}

// frameReader reads frames.
type frameReader struct {
	*bufio.Reader
	long *[maxFrame]byte // of the last frame; nil if that was not long
}

func newFrameReader(r io.Reader) frameReader {
	return frameReader{Reader: bufio.NewReaderSize(r, frameBuffer)}
}

// next reads a frame.
func (r *frameReader) next() (frame, error) {
	if r.long != nil {
		longFrames.Put(r.long)
		r.long = nil
	}
	head, err := r.Peek(frameHead)
	if err != nil {
		return frame{}, err
	}
	n := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
	f := frame{kind: head[3], flags: head[4], stream: binary.BigEndian.Uint32(head[5:]) & maxStreamID}
	if n > maxFrame {
		return f, frameSizeError("frame too large")
	}
	_, _ = r.Discard(frameHead)
	if n > r.Size() {
		r.long = longFrames.Get().(*[maxFrame]byte)
		f.payload = r.long[:n]
		if _, err = io.ReadFull(r, f.payload); errors.Is(err, io.ErrUnexpectedEOF) {
			err = io.EOF // as of a frame that fits
		}
		return f, err
	}
	f.payload, err = r.Peek(n)
	_, _ = r.Discard(len(f.payload)) // which leaves the bytes where they are
	return f, err
}

// forms are what frames look like: whether they are of a stream, or of the connection, and the size of their payload.
// Of window updates both are allowed, and of some the size depends on what they say: these are 0.
var forms = [...]struct {
	ofStream, ofConn bool
	size             int
}{
	typeData:         {ofStream: true},
	typeHeaders:      {ofStream: true},
	typePriority:     {ofStream: true, size: 5},
	typeReset:        {ofStream: true, size: 4},
	typeSettings:     {ofConn: true},
	typePushPromise:  {ofStream: true},
	typePing:         {ofConn: true, size: 8},
	typeGoAway:       {ofConn: true},
	typeWindowUpdate: {ofStream: true, ofConn: true, size: 4},
	typeContinuation: {ofStream: true},
}

// check returns an error unless a frame has the form of its type.
func (f *frame) check() error {
	if int(f.kind) >= len(forms) {
		return nil
	}
	form := forms[f.kind]
	switch {
	case f.stream == 0 && !form.ofConn:
		return protocolError("a frame without a stream")
	case f.stream != 0 && !form.ofStream:
		return protocolError("a frame of a stream that is of the connection alone")
	case form.size == 0 || len(f.payload) == form.size:
		return nil
	case f.kind == typePriority:
		return &streamError{f.stream, codeFrameSize}
	}
	return frameSizeError("invalid size of a frame")
}

// unpad removes the padding of DATA and HEADERS, and the priority of HEADERS.
func (f *frame) unpad() error {
	pad := 0
	if f.has(flagPadded) {
		if len(f.payload) < 1 {
			return frameSizeError("no length of padding")
		}
		pad = int(f.payload[0])
		f.payload = f.payload[1:]
	}
	if f.kind == typeHeaders && f.has(flagPriority) {
		if len(f.payload) < 5 {
			return frameSizeError("no priority")
		}
		if binary.BigEndian.Uint32(f.payload)&maxStreamID == f.stream {
			return protocolError("a stream that depends on itself")
		}
		f.payload = f.payload[5:]
	}
	if pad > len(f.payload) {
		return protocolError("more padding than payload")
	}
	f.payload = f.payload[:len(f.payload)-pad]
	return nil
}

// appendFrame appends the head of a frame with a payload of n bytes.
func appendFrame(b []byte, kind, flags uint8, stream uint32, n int) []byte {
	return append(b, byte(n>>16), byte(n>>8), byte(n), kind, flags, byte(stream>>24), byte(stream>>16), byte(stream>>8), byte(stream))
}

func appendReset(b []byte, stream uint32, c code) []byte {
	return binary.BigEndian.AppendUint32(appendFrame(b, typeReset, 0, stream, 4), uint32(c))
}

func appendWindowUpdate(b []byte, stream uint32, n int) []byte {
	return binary.BigEndian.AppendUint32(appendFrame(b, typeWindowUpdate, 0, stream, 4), uint32(n))
}

func appendGoAway(b []byte, last uint32, c code) []byte {
	b = binary.BigEndian.AppendUint32(appendFrame(b, typeGoAway, 0, 0, 8), last)
	return binary.BigEndian.AppendUint32(b, uint32(c))
}

func appendSetting(b []byte, id uint16, value uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(b, id), value)
}
