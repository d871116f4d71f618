package http2

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	xhttp2 "golang.org/x/net/http2"
)

// FuzzFrames compares what is read with what the framer of golang.org/x/net reads.
func FuzzFrames(f *testing.F) {
	var seed bytes.Buffer
	framer := xhttp2.NewFramer(&seed, nil)
	_ = framer.WriteDataPadded(1, true, []byte("hello"), make([]byte, 3))
	_ = framer.WriteHeaders(xhttp2.HeadersFrameParam{StreamID: 3, BlockFragment: []byte("x"), PadLength: 2, Priority: xhttp2.PriorityParam{StreamDep: 1}})
	_ = framer.WriteContinuation(3, true, []byte("y"))
	for _, size := range []int{frameBuffer, frameBuffer + 1, maxFrame} {
		_ = framer.WriteData(1, false, bytes.Repeat([]byte("z"), size))
	}
	_ = framer.WriteSettings(xhttp2.Setting{ID: 1, Val: 2})
	f.Add(seed.Bytes())
	f.Add([]byte("\x00\x40\x01\x00\x00\x00\x00\x00\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		model := xhttp2.NewFramer(nil, bytes.NewReader(data))
		model.SetMaxReadFrameSize(maxFrame)
		model.AllowIllegalReads = true
		r := newFrameReader(bytes.NewReader(data))
		for {
			want, err := model.ReadFrame()
			got, gotErr := r.next()
			if gotErr != nil {
				require.Error(t, err)
				return
			}
			var unpadErr error
			if got.kind == typeData || got.kind == typeHeaders {
				unpadErr = got.unpad()
			}
			if err != nil {
				return // of what a frame says: the tests of the connection have that
			}
			h := want.Header()
			require.Equal(t, uint8(h.Type), got.kind)
			require.Equal(t, uint8(h.Flags), got.flags)
			require.Equal(t, h.StreamID, got.stream)
			switch want := want.(type) {
			case *xhttp2.DataFrame:
				require.NoError(t, unpadErr)
				require.Equal(t, string(want.Data()), string(got.payload))
			case *xhttp2.HeadersFrame:
				if unpadErr == nil { // a stream that depends on itself is an error here
					require.Equal(t, string(want.HeaderBlockFragment()), string(got.payload))
				}
			default:
				require.EqualValues(t, h.Length, len(got.payload))
			}
		}
	})
}

// FuzzTargets compares targets with those of package url.
func FuzzTargets(f *testing.F) {
	for _, path := range []string{"/", "/api/v1/pods?watch=1&x=%20", "/a%2Fb?", "//host/x", "/a;b=c@d", "/a#b", "/?a#b", "/é"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		var got url.URL
		err := parseTarget(path, http.MethodGet, &got)
		want, wantErr := url.ParseRequestURI(path)
		if len(path) == 0 || path[0] != '/' || strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			require.Error(t, err)
			return
		}
		require.Equal(t, wantErr != nil, err != nil)
		if err == nil {
			require.Equal(t, *want, got)
		}
	})
}

// FuzzConnection has a connection read anything: it must end when its client does, with all of its handlers.
func FuzzConnection(f *testing.F) {
	var seed bytes.Buffer
	framer := xhttp2.NewFramer(&seed, nil)
	_ = framer.WriteSettings(xhttp2.Setting{ID: xhttp2.SettingInitialWindowSize, Val: 5})
	_ = framer.WriteHeaders(xhttp2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x82, 0x84, 0x87}, EndHeaders: true})
	_ = framer.WriteData(1, false, []byte("hello"))
	_ = framer.WriteWindowUpdate(1, 100)
	_ = framer.WritePing(false, [8]byte{})
	_ = framer.WriteRSTStream(1, 8)
	_ = framer.WriteGoAway(0, 0, nil)
	f.Add(seed.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		config := testConfig(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(w, r.Body)
			w.Header().Set("X", r.URL.Path)
		}))
		s := NewServer(config)
		ours, theirs := net.Pipe()
		done := make(chan *conn)
		go func() {
			c := newConn(context.Background(), s, theirs, nil)
			_ = c.serve(true)
			done <- c
		}()
		go func() { _, _ = io.Copy(io.Discard, ours) }()
		_ = ours.SetWriteDeadline(time.Now().Add(soon))
		_, _ = ours.Write(data)
		_ = ours.Close()
		c := <-done
		require.Eventually(t, func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.running == 0 && len(c.streams) == 0
		}, soon, time.Millisecond)
	})
}
