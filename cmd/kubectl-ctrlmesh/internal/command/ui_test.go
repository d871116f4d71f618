package command

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

func TestUIServesUntilItIsInterrupted(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, printed := io.Pipe()
	var errs bytes.Buffer
	e := connected(t, meshtest.Healthy(t), genericiooptions.IOStreams{Out: printed, ErrOut: &errs})
	code := make(chan int)
	go func() { code <- e.run(ctx, []string{"ui"}) }()
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	url, _, _ := strings.Cut(strings.TrimPrefix(line, "open "), " ")
	require.Regexp(t, `^http://127\.0\.0\.1:\d+/\w{26}/$`, url)

	resp, err := http.Get(url) // the test's own server
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s", text)
	require.Contains(t, string(text), "operator-demo")
	interrupt()
	require.Equal(t, Healthy, <-code, "%s", errs.String())
}

func TestUIRefusesAPortInUse(t *testing.T) {
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	_, port, err := net.SplitHostPort(taken.Addr().String())
	require.NoError(t, err)
	r := run(t, meshtest.Healthy(t), "", "ui", "--port="+port)
	require.Equal(t, Unknown, r.code)
	require.Contains(t, r.err, "name another port by --port")
}
