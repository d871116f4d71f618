package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// row is one thing to measure.
type row struct {
	name string
	unit string // of what is counted
	list bool   // bytes matter, not only how many
	run  func(ctx context.Context, s *subject) (sample, error)
}

func rows(namespace string, api *subject) []row {
	get := request{path: collection(namespace) + "/" + objectName(objects-1), accept: jsonType}
	list := func(accept string, gzip bool) func(context.Context, *subject) (sample, error) {
		r := request{path: collection(namespace), accept: accept, gzip: gzip}
		least := int64(objects * 800)
		if gzip {
			least = objects * 20
		}
		return loop{request: r, workers: 1, atMost: 3, least: least}.run
	}
	watch := func(n int) func(context.Context, *subject) (sample, error) {
		return watches{namespace: namespace, count: n, writer: api.clients[0]}.run
	}
	return []row{
		{"GET 1 KB, one at a time", "request", false, loop{request: get, workers: 1, lasts: 600 * time.Millisecond, least: 800}.run},
		{"GET 1 KB, 32 at a time on 4 connections", "request", false, loop{request: get, workers: 32, lasts: 600 * time.Millisecond, least: 800}.run},
		{"LIST 5,000, JSON", "request", true, list(jsonType, false)},
		{"LIST 5,000, protobuf", "request", true, list(protobufType, false)},
		{"LIST 5,000, JSON, gzip", "request", true, list(jsonType, true)},
		{"WATCH, 500 updates/s, 1 watch", "event", false, watch(1)},
		{"WATCH, 500 updates/s, 10 watches", "event", false, watch(10)},
	}
}

// loop sends one request over and over, each worker the next when the last was
// answered.
type loop struct {
	request request
	workers int
	least   int64         // bytes that an answer must have
	lasts   time.Duration // or:
	atMost  int64         // so many requests
}

func (l loop) run(ctx context.Context, s *subject) (sample, error) {
	var out sample
	var mu sync.Mutex
	var sent atomic.Int64
	start := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for i := range l.workers {
		group.Go(func() error {
			var mine sample
			for (l.lasts == 0 || time.Since(start) < l.lasts) && (l.atMost == 0 || sent.Add(1) <= l.atMost) {
				t := time.Now()
				n, err := s.clients[i%connections].do(ctx, l.request)
				if err != nil {
					return err
				}
				if n < l.least {
					return fmt.Errorf("only %d bytes of %s", n, l.request.path)
				}
				mine.latencies = append(mine.latencies, time.Since(t))
				mine.bytes += n
			}
			mu.Lock()
			defer mu.Unlock()
			out.count += len(mine.latencies)
			out.bytes += mine.bytes
			out.latencies = append(out.latencies, mine.latencies...)
			return nil
		})
	}
	err := group.Wait()
	out.elapsed = time.Since(start)
	return out, err
}
