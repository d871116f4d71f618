package upstream

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

// Bounds of the head of a response, and of its trailer.
const (
	maxHead  = 256 << 10 // bytes
	maxLines = 2048
)

var (
	errMalformed = errors.New("malformed response")
	errLargeHead = fmt.Errorf("the head of the response has more than %d bytes or %d lines", maxHead, maxLines)
)

// message is a response as it is read from a connection of HTTP/1.1 (RFC 9112).
type message struct {
	status  int
	fields  header.Fields
	old     bool // of HTTP/1.0
	close   bool // nothing follows it on the connection
	content content
	trailer *Trailer
}

// response returns the message with a body.
func (m *message) response(body io.ReadCloser) Response {
	return Response{Status: m.status, Header: m.fields, Trailer: m.trailer, Body: body}
}

// readMessage reads the head of a response to a method.
func readMessage(br *bufio.Reader, method string) (m message, err error) {
	line, fields, err := readFields(br, true)
	if err != nil {
		return message{}, err
	}
	m.fields = fields
	if m.status, m.old, err = parseStatus(line); err != nil {
		return message{}, err
	}
	m.close = httpguts.HeaderValuesContainsToken(fields.Values("Connection"), "close") ||
		m.old && !httpguts.HeaderValuesContainsToken(fields.Values("Connection"), "keep-alive")
	m.content.br = br
	if err := m.frame(method); err != nil {
		return message{}, err
	}
	return m, nil
}

// parseStatus reads a status line.
func parseStatus(line string) (status int, old bool, err error) {
	proto, rest, _ := strings.Cut(line, " ")
	code, _, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(code, 10, 16)
	if err != nil || len(code) != 3 || n < 100 || proto != "HTTP/1.1" && proto != "HTTP/1.0" {
		return 0, false, fmt.Errorf("%w: status line", errMalformed)
	}
	return int(n), proto == "HTTP/1.0", nil
}

// frame determines how the body ends: RFC 9112, section 6.3.
func (m *message) frame(method string) error {
	length, lengths, err := contentLength(m.fields)
	if err != nil {
		return err
	}
	coding, codings := m.fields.Count("Transfer-Encoding")
	if codings > 1 || codings == 1 && (!strings.EqualFold(coding, "chunked") || m.old) {
		return fmt.Errorf("%w: Transfer-Encoding", errMalformed)
	}
	switch {
	case codings > 0:
		m.fields.Drop("Content-Length")
	case lengths > 1:
		m.fields.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	switch {
	case m.status < 200, m.status == http.StatusNoContent, m.status == http.StatusNotModified, method == http.MethodHead:
		m.content.left = 0
	case codings > 0:
		m.content.chunks = httputil.NewChunkedReader(m.content.br)
		m.announce()
	case lengths > 0:
		m.content.left = length
	default:
		m.content.left, m.close = -1, true
	}
	m.fields.Drop("Transfer-Encoding", "Trailer")
	return nil
}

// announce notes the names of the fields that follow the body.
func (m *message) announce() {
	if names := header.TrailerNames(m.fields.Values("Trailer")); names != nil {
		m.trailer = &Trailer{Names: names}
		m.content.trailer = m.trailer
	}
}

// contentLength returns the length that a head declares, and how often it does.
func contentLength(fields header.Fields) (length int64, times int, err error) {
	for i := range fields {
		if fields[i].Name != "Content-Length" {
			continue
		}
		n, err := strconv.ParseUint(fields[i].Value, 10, 63)
		if err != nil || times > 0 && int64(n) != length {
			return 0, 0, fmt.Errorf("%w: Content-Length", errMalformed)
		}
		length = int64(n)
		times++
	}
	return length, times, nil
}

// readFields reads lines up to an empty one: first that of the status, if it is due, then fields.
func readFields(br *bufio.Reader, status bool) (line string, fields header.Fields, err error) {
	text, lines, err := readLines(br)
	if err != nil {
		return "", nil, err
	}
	if status {
		line, text = cutLine(text)
		lines--
	}
	if lines <= 0 {
		return line, nil, nil
	}
	fields = make(header.Fields, 0, lines)
	for text != "" {
		var one string
		one, text = cutLine(text)
		name, value, ok := strings.Cut(one, ":")
		value = strings.Trim(value, " \t")
		if !ok || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return "", nil, fmt.Errorf("%w: a field of the head", errMalformed)
		}
		fields = append(fields, header.Field{Name: http.CanonicalHeaderKey(name), Value: value})
	}
	return line, fields, nil
}

// readLines reads lines up to an empty one, which it leaves out.
func readLines(br *bufio.Reader) (text string, lines int, err error) {
	pooled := heads.Get().(*[]byte)
	b := (*pooled)[:0]
	defer func() {
		if cap(b) <= 64<<10 {
			*pooled = b
			heads.Put(pooled)
		}
	}()
	begun := 0
	for {
		part, err := br.ReadSlice('\n')
		if b = append(b, part...); len(b) > maxHead || lines > maxLines {
			return "", 0, errLargeHead
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return "", 0, err
		}
		if last := b[begun:]; string(last) == "\n" || string(last) == "\r\n" {
			return string(b[:begun]), lines, nil
		}
		begun = len(b)
		lines++
	}
}

func cutLine(text string) (line, rest string) {
	line, rest, _ = strings.Cut(text, "\n")
	return strings.TrimSuffix(line, "\r"), rest
}

// content is the content of a message, without its framing.
type content struct {
	br      *bufio.Reader
	chunks  io.Reader // nil: not in chunks
	left    int64     // bytes; -1: up to the end of the connection
	trailer *Trailer  // nil: none was announced
}

func (c *content) empty() bool { return c.chunks == nil && c.left == 0 }

// Read implements io.Reader. One that reads nothing waits for the next chunk.
func (c *content) Read(p []byte) (int, error) {
	switch {
	case c.chunks != nil:
		n, err := c.chunks.Read(p)
		if err == io.EOF { //nolint:errorlint // a wrapped one is a body cut short
			err = c.readTrailer()
		}
		return n, err
	case c.left < 0:
		return c.br.Read(p)
	case c.left == 0:
		return 0, io.EOF
	}
	n, err := c.br.Read(p[:min(int64(len(p)), c.left)])
	if c.left -= int64(n); c.left == 0 {
		return n, io.EOF
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// readTrailer reads what follows the last chunk.
func (c *content) readTrailer() error {
	_, fields, err := readFields(c.br, false)
	if err != nil {
		return err
	}
	if c.trailer != nil {
		c.trailer.set(fields)
	}
	return io.EOF
}
