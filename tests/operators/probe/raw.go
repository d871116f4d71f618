package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/rest"
)

// answer is an unmodified answer. For a stream, Body is nil and Frames are its undecoded
// events.
type answer struct {
	Code   int         `json:"code"`
	Proto  string      `json:"proto"`
	Header http.Header `json:"header"`
	Body   []byte      `json:"body,omitempty"`
	Frames [][]byte    `json:"frames,omitempty"`
}

// maxFrame is larger than any event, in bytes.
const maxFrame = 8 << 20

func raw(ctx context.Context, args []string) ([]*answer, error) {
	flags := flag.NewFlagSet("raw", flag.ContinueOnError)
	header := http.Header{}
	flags.Func("H", "a header, as `Key: value`; may be repeated", func(s string) error {
		key, value, ok := strings.Cut(s, ":")
		if !ok {
			return errors.New("no colon")
		}
		header.Add(strings.TrimSpace(key), strings.TrimSpace(value))
		return nil
	})
	body := flags.String("d", "", "the body")
	last := flags.String("until", "", "read a stream of events, up to the first one that has this `text` in it")
	http1 := flags.Bool("http1", false, "speak HTTP/1.1")
	timeout := flags.Duration("timeout", time.Minute, "how long to wait at most")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() < 2 {
		return nil, errors.New("METHOD and PATH?")
	}
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()

	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, err
	}
	config.DisableCompression = true // encodings that are requested and sent must stay visible
	if *http1 {
		config.NextProtos = []string{"http/1.1"}
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	var out []*answer
	for _, path := range flags.Args()[1:] {
		req, err := http.NewRequestWithContext(ctx, flags.Arg(0), config.Host+path, strings.NewReader(*body))
		if err != nil {
			return nil, err
		}
		req.Header = header.Clone()
		a, err := ask(client, req, *last)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		out = append(out, a)
	}
	return out, nil
}

func ask(client *http.Client, req *http.Request, last string) (*answer, error) {
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	a := &answer{Code: resp.StatusCode, Proto: resp.Proto, Header: resp.Header}
	if last != "" && resp.StatusCode == http.StatusOK {
		a.Frames, err = frames(resp, last)
	} else {
		a.Body, err = io.ReadAll(resp.Body)
	}
	return a, err
}

// frames reads events up to the one that contains last.
func frames(resp *http.Response, last string) ([][]byte, error) {
	var framer runtime.Framer = json.Framer
	if strings.Contains(resp.Header.Get("Content-Type"), "protobuf") {
		framer = protobuf.LengthDelimitedFramer
	}
	events := framer.NewFrameReader(resp.Body)
	var out [][]byte
	buf := make([]byte, maxFrame)
	for {
		n, err := events.Read(buf)
		if err != nil {
			return nil, fmt.Errorf("after %d events, without %q in them: %w", len(out), last, err)
		}
		out = append(out, bytes.Clone(buf[:n]))
		if bytes.Contains(buf[:n], []byte(last)) {
			return out, nil
		}
	}
}
