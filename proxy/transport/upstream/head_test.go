package upstream

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/proxy/transport/header"
)

func TestReadsMessages(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for name, c := range map[string]struct {
		method, in string
		fields     header.Fields
		body       string
		close      bool
		rest       string // of the connection
	}{
		"a length":       {"GET", ok + "content-length: 2\r\nX-A:  b \r\n\r\n{}HTTP", header.Fields{{Name: "Content-Length", Value: "2"}, {Name: "X-A", Value: "b"}}, "{}", false, "HTTP"},
		"chunks":         {"GET", ok + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n1\r\n \r\n0\r\n\r\nHTTP", header.Fields{}, "{} ", false, "HTTP"},
		"a length twice": {"GET", ok + "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", header.Fields{{Name: "Content-Length", Value: "2"}}, "{}", false, ""},
		"chunks win":     {"GET", ok + "Content-Length: 9\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", header.Fields{}, "", false, ""},
		"up to the end":  {"GET", ok + "\r\n{}", nil, "{}", true, ""},
		"nothing":        {"GET", "HTTP/1.1 204 No Content\r\n\r\nHTTP", nil, "", false, "HTTP"},
		"of HEAD":        {"HEAD", ok + "Content-Length: 7\r\n\r\nHTTP", header.Fields{{Name: "Content-Length", Value: "7"}}, "", false, "HTTP"},
		"closed":         {"GET", ok + "Connection: x, Close\r\nContent-Length: 0\r\n\r\n", header.Fields{{Name: "Connection", Value: "x, Close"}, {Name: "Content-Length", Value: "0"}}, "", true, ""},
		"of HTTP/1.0":    {"GET", "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n1", header.Fields{{Name: "Content-Length", Value: "1"}}, "1", true, ""},
		"without reason": {"GET", "HTTP/1.1 200\nContent-Length: 0\n\n", header.Fields{{Name: "Content-Length", Value: "0"}}, "", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			br := bufio.NewReaderSize(strings.NewReader(c.in), 16)
			m, err := readMessage(br, c.method)
			require.NoError(t, err)
			body, err := io.ReadAll(&m.content)
			require.NoError(t, err)
			require.Equal(t, c.body, string(body))
			require.Equal(t, c.fields, m.fields)
			require.Equal(t, c.close, m.close)
			rest, _ := io.ReadAll(br)
			require.Equal(t, c.rest, string(rest))
		})
	}
}

func TestTrailersHaveTheFieldsThatWereAnnounced(t *testing.T) {
	m, err := readMessage(bufio.NewReader(strings.NewReader("HTTP/1.1 200 OK\r\nTrailer: x-sum, Content-Length\r\nTransfer-Encoding: chunked\r\n\r\n"+
		"1\r\n \r\n0\r\nX-Sum: 42\r\nX-Other: 1\r\nContent-Length: 9\r\n\r\n")), "GET")
	require.NoError(t, err)
	require.Equal(t, []string{"X-Sum"}, m.trailer.Names)
	_, err = io.ReadAll(&m.content)
	require.NoError(t, err)
	require.Equal(t, header.Fields{{Name: "X-Sum", Value: "42"}}, m.trailer.Fields)
	require.False(t, m.fields.Has("Trailer"))
}

func TestRefusesMalformedMessages(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for name, in := range map[string]string{
		"no status":               "HTTP/1.1\r\n\r\n",
		"another protocol":        "HTTP/2.0 200 OK\r\n\r\n",
		"a long status":           "HTTP/1.1 2000 OK\r\n\r\n",
		"a signed status":         "HTTP/1.1 +20 OK\r\n\r\n",
		"two lengths":             ok + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
		"a signed length":         ok + "Content-Length: +1\r\n\r\n1",
		"another coding, no body": "HTTP/1.1 204 \r\nTransfer-Encoding: gzip\r\n\r\n",
		"another coding":          ok + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
		"chunks in HTTP/1.0":      "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"a folded line":           ok + "X-A: 1\r\n 2\r\n\r\n",
		"a space in a name":       ok + "X A: 1\r\n\r\n",
		"a return in a line":      ok + "X-A: 1\rX-B: 2\r\n\r\n",
		"no colon":                ok + "X-A\r\n\r\n",
	} {
		_, err := readMessage(bufio.NewReader(strings.NewReader(in)), "GET")
		require.ErrorIs(t, err, errMalformed, name)
	}
	_, err := readMessage(bufio.NewReader(strings.NewReader(ok+"X-A: "+strings.Repeat("x", maxHead))), "GET")
	require.ErrorIs(t, err, errLargeHead)
	_, err = readMessage(bufio.NewReader(strings.NewReader(ok+strings.Repeat("X:\r\n", maxLines+1))), "GET")
	require.ErrorIs(t, err, errLargeHead)
	for _, in := range []string{"", ok, ok + "X-A: 1\r\n", ok + "Content-Length: 2\r\n\r\n1", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\n1", ok + "Transfer-Encoding: chunked\r\n\r\n0\r\n"} {
		m, err := readMessage(bufio.NewReader(strings.NewReader(in)), "GET")
		if err == nil {
			_, err = io.ReadAll(&m.content)
		}
		require.ErrorIs(t, err, io.ErrUnexpectedEOF, in)
	}
}

// What is read is what net/http reads, which accepts other heads, too. Only it insists on CR in some places.
func FuzzMessage(f *testing.F) {
	for _, in := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n",
		"HTTP/1.0 404 Not Found\r\nConnection: keep-alive\r\n\r\nno",
		"HTTP/1.1 304 Not Modified\r\nEtag: 1\r\n\r\n",
	} {
		f.Add("GET", in)
		f.Add("HEAD", in)
	}
	f.Fuzz(func(t *testing.T, method, in string) {
		m, err := readMessage(bufio.NewReader(strings.NewReader(in)), method)
		if err != nil || m.status < 200 {
			return
		}
		body, err := io.ReadAll(&m.content)
		model, modelErr := http.ReadResponse(bufio.NewReader(strings.NewReader(in)), &http.Request{Method: method})
		if modelErr != nil && m.fields.Has("Content-Length") || strings.Contains(strings.ToLower(in), "trailer") && modelErr != nil {
			return // net/http refuses more lengths, and names of trailers that are left out here
		}
		require.NoError(t, modelErr)
		want, wantErr := io.ReadAll(model.Body)
		require.Equal(t, model.StatusCode, m.status)
		require.Equal(t, model.Close, m.close)
		if bare := strings.Contains(strings.ReplaceAll(in, "\r\n", ""), "\n"); err == nil && wantErr != nil && bare || errors.Is(err, errMalformed) {
			return
		}
		require.Equal(t, wantErr == nil, err == nil, "%v, %v", wantErr, err)
		require.Equal(t, string(want), string(body))
		got := http.Header{}
		m.fields.AddTo(got)
		// What is of the connection is dropped later, and what net/http adds to Pragma is not asked for.
		for _, name := range []string{"Trailer", "Connection", "Cache-Control"} {
			delete(model.Header, name)
			delete(got, name)
		}
		require.Equal(t, model.Header, got)
	})
}
