package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
)

const (
	updates     = 500 // a second
	watchTurn   = 500 * time.Millisecond
	watchGrace  = 5 * time.Second // wait for the last events
	sentKey     = "sent"
	noTime      = "0000000000000000000" // as long as current Unix times in nanoseconds
	longestLine = 64 << 10
)

// watches opens a number of watches on one connection, writes at a fixed rate directly to the
// apiserver, and measures the time from before a write until its event is read.
type watches struct {
	namespace string
	count     int
	writer    *client
}

func (w watches) run(ctx context.Context, s *subject, begin func() error) (sample, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	version, err := w.version(ctx)
	if err != nil {
		return sample{}, err
	}
	streams := make([]*http.Response, w.count)
	for i := range streams {
		streams[i], err = s.clients[0].send(ctx, request{accept: jsonType, path: fmt.Sprintf(
			"%s?watch=true&resourceVersion=%s&timeoutSeconds=60&labelSelector=%s%%3Dyes", collection(w.namespace), version, hotLabel)})
		if err != nil {
			return sample{}, err
		}
		defer func() { _ = streams[i].Body.Close() }()
	}
	// A watch lasts for minutes: the cost of opening one is not measured.
	if err := begin(); err != nil {
		return sample{}, err
	}
	want := int(updates * watchTurn.Seconds())
	late := time.AfterFunc(watchTurn+watchGrace, cancel)
	defer late.Stop()
	start := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.write(ctx, want) })
	latencies, bytes := make([][]time.Duration, w.count), atomic.Int64{}
	for i, stream := range streams {
		group.Go(func() (err error) {
			var n int64
			latencies[i], n, err = events(stream, want)
			bytes.Add(n)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return sample{}, fmt.Errorf("watching: %w", err)
	}
	out := sample{count: want * w.count, bytes: bytes.Load(), elapsed: time.Since(start)}
	for _, l := range latencies {
		out.latencies = append(out.latencies, l...)
	}
	return out, nil
}

// version returns the resourceVersion at which the watches start.
func (w watches) version(ctx context.Context) (string, error) {
	resp, err := w.writer.send(ctx, request{path: collection(w.namespace) + "?limit=1", accept: jsonType})
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var list corev1.ConfigMapList
	err = json.NewDecoder(resp.Body).Decode(&list)
	return list.ResourceVersion, err
}

// write updates objects at a fixed rate, without waiting for answers.
func (w watches) write(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	due := make(chan struct{}, n)
	for i := range hotObjects {
		group.Go(func() error {
			for range due {
				sent := strconv.FormatInt(time.Now().UnixNano(), 10)
				r := request{method: http.MethodPut, path: collection(w.namespace) + "/" + objectName(i), accept: protobufType, body: hot(i, sent)}
				if _, err := w.writer.do(ctx, r); err != nil {
					return err
				}
			}
			return nil
		})
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	start, done := time.Now(), 0
	for done < n && ctx.Err() == nil {
		<-tick.C
		for ; done < min(n, int(time.Since(start).Seconds()*updates)); done++ {
			due <- struct{}{}
		}
	}
	close(due)
	return group.Wait()
}

// events reads n events and the age of each.
func events(stream *http.Response, n int) ([]time.Duration, int64, error) {
	out, size := make([]time.Duration, 0, n), int64(0)
	lines := bufio.NewScanner(stream.Body)
	lines.Buffer(nil, longestLine)
	for len(out) < n {
		if !lines.Scan() {
			return nil, 0, fmt.Errorf("%d of %d events came: %w", len(out), n, errors.Join(lines.Err(), errEnded))
		}
		now := time.Now()
		line := lines.Bytes()
		if !bytes.HasPrefix(line, []byte(`{"type":"MODIFIED"`)) {
			return nil, 0, fmt.Errorf("not an update: %.100s", line)
		}
		_, after, _ := bytes.Cut(line, []byte(`"`+sentKey+`":"`))
		sent, err := strconv.ParseInt(string(after[:min(len(after), len(noTime))]), 10, 64)
		if err != nil {
			return nil, 0, fmt.Errorf("no time in an event: %w", err)
		}
		out = append(out, now.Sub(time.Unix(0, sent)))
		size += int64(len(line)) + 1
	}
	return out, size, nil
}

var errEnded = errors.New("the watch ended")
