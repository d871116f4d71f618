package lock

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// maxFrame bounds one watch event, in bytes.
const maxFrame = 16 << 20

// Events returns the watch stream r with the names swapped, event by event. Each Read
// returns bytes of at most one event, so a caller that flushes after each Read delivers
// events as they arrive. contentType is the content type of the stream.
func (l *Lock) Events(contentType string, r io.Reader) (io.Reader, error) {
	media, err := mediaType(contentType)
	if err != nil {
		return nil, err
	}
	in := bufio.NewReader(r)
	switch media {
	case typeJSON:
		return &frames{next: func() ([]byte, error) { return l.nextJSON(in) }}, nil
	case typeProtobuf:
		return &frames{next: func() ([]byte, error) { return l.nextProto(in) }}, nil
	}
	return nil, fmt.Errorf("%w %q", ErrUnsupported, media)
}

type frames struct {
	next func() ([]byte, error)
	rest []byte
	err  error
}

func (f *frames) Read(p []byte) (int, error) {
	if len(f.rest) == 0 && f.err == nil {
		f.rest, f.err = f.next()
	}
	if len(f.rest) > 0 {
		n := copy(p, f.rest)
		f.rest = f.rest[n:]
		return n, nil
	}
	return 0, f.err
}

func (l *Lock) nextJSON(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := in.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > maxFrame {
			return nil, fmt.Errorf("a watch event is larger than %d bytes", maxFrame)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if len(bytes.TrimSpace(line)) == 0 {
			return line, err
		}
		edited, editErr := l.eventJSON(line)
		if editErr != nil {
			return line, err // not an event: not ours to edit
		}
		return edited, err
	}
}

func (l *Lock) eventJSON(event []byte) ([]byte, error) {
	kind := ""
	_, _, err := editJSON(event, &shape{fields: map[string]*shape{
		"object": {fields: map[string]*shape{"kind": {text: note(&kind)}}},
	}})
	if err != nil {
		return nil, err
	}
	out, _, err := editJSON(event, &shape{fields: map[string]*shape{"object": l.down.answer(kind)}})
	return out, err
}

func (l *Lock) nextProto(in *bufio.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size > maxFrame {
		return nil, fmt.Errorf("a watch event is larger than %d bytes", maxFrame)
	}
	var event bytes.Buffer
	if _, err := io.CopyN(&event, in, int64(size)); err != nil {
		return nil, fmt.Errorf("a watch event ends early: %w", io.ErrUnexpectedEOF)
	}
	object := func(b []byte) ([]byte, bool, error) { return editProto(b, l.down.answerMessage) }
	edited, _, err := message{eventObject: message{extensionRaw: object}.edit}.edit(event.Bytes())
	if err != nil {
		edited = event.Bytes() // not an event: not ours to edit
	}
	out := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(edited)), uint32(len(edited)))
	return append(out, edited...), nil
}
