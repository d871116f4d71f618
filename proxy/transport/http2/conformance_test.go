package http2

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	h2spec "github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/tcptest"
)

// TestConformance runs all tests of h2spec.
func TestConformance(t *testing.T) {
	at := listen(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "hello")
	}))
	c := &config.Config{
		Host: at.IP.String(), Port: at.Port, Path: "/", Timeout: soon, MaxHeaderLen: 4000, Strict: true,
	}
	passed := 0
	for _, group := range []*spec.TestGroup{generic.Spec(), h2spec.Spec(), hpack.Spec()} {
		group.Test(c)
		report(t, group)
		passed += group.PassedCount
	}
	require.Equal(t, h2specTests, passed)
}

// h2specTests is how many tests h2spec has.
const h2specTests = 146

func report(t *testing.T, group *spec.TestGroup) {
	t.Helper()
	for _, test := range append(group.Tests, group.StrictTests...) {
		if r := test.Result; r != nil && (r.Failed || r.Skipped) {
			t.Errorf("%s %s: %s: %v", group.Section, group.Name, test.Desc, r.Error)
		}
	}
	for _, g := range group.Groups {
		report(t, g)
	}
}

// testConfig is what tests serve by.
func testConfig(h http.Handler) Config {
	return Config{
		Handler: HTTP(h), MaxStreams: 100, StreamWindow: 64 << 10, ConnWindow: 256 << 10, MaxHeader: 128 << 10,
		Idle: time.Minute, Stall: func() time.Duration { return time.Minute }, ErrorLog: log.New(io.Discard, "", 0),
	}
}

// listen serves h without TLS, and returns where.
func listen(t *testing.T, h http.Handler) *net.TCPAddr {
	t.Helper()
	s := NewServer(testConfig(h))
	at, err := net.ResolveTCPAddr("tcp", tcptest.Serve(t, func(c net.Conn) { s.Serve(context.Background(), c, nil, false) }))
	require.NoError(t, err)
	return at
}
