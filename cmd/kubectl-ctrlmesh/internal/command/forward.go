package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// forwarded is the answer of a port of a pod to a GET request. It ends with its connection: what is left of it is not
// read.
type forwarded struct {
	io.Reader
	close func() error
}

// Close implements io.Closer.
func (f forwarded) Close() error { return f.close() }

// forward sends a GET request to a port of a pod by the port forwarding at a URL. The kubelet connects to the port,
// which no NetworkPolicy prevents. The answer ends with the context.
func forward(ctx context.Context, config *rest.Config, at *url.URL, port int32, path string) (io.ReadCloser, error) {
	dialer, err := dialerOf(config, at)
	if err != nil {
		return nil, err
	}
	conn, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // it may have ended
	end := func() error { stop(); return conn.Close() }
	answer, err := request(conn, port, path)
	if err != nil {
		return nil, errors.Join(err, ctx.Err(), end())
	}
	return forwarded{answer.Body, end}, nil
}

// dialerOf returns what connects by WebSockets, or by SPDY to what has none.
func dialerOf(config *rest.Config, at *url.URL) (httpstream.Dialer, error) {
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	websockets, err := portforward.NewSPDYOverWebsocketDialerForStreaming(at, config)
	if err != nil {
		return nil, err
	}
	older := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, at)
	return portforward.NewFallbackDialerForStreaming(websockets, older, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	}), nil
}

// request sends a GET request by a connection that forwards ports.
func request(conn httpstream.Connection, port int32, path string) (*http.Response, error) {
	header := http.Header{}
	header.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	header.Set(corev1.PortForwardRequestIDHeader, "0")
	header.Set(corev1.StreamType, corev1.StreamTypeError)
	if _, err := conn.CreateStream(header); err != nil {
		return nil, fmt.Errorf("forwarding port %d: %w", port, err)
	}
	header.Set(corev1.StreamType, corev1.StreamTypeData)
	stream, err := conn.CreateStream(header)
	if err != nil {
		return nil, fmt.Errorf("forwarding port %d: %w", port, err)
	}
	get, err := http.NewRequest(http.MethodGet, "http://localhost"+path, nil) // the connection ends with the context
	if err != nil {
		return nil, err
	}
	get.Close = true
	if err := get.Write(stream); err != nil {
		return nil, fmt.Errorf("writing to port %d: %w", port, err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(stream), get)
	if err != nil {
		return nil, fmt.Errorf("port %d gave no answer: %w", port, err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("port %d answered %s", port, answer.Status)
	}
	return answer, nil
}
