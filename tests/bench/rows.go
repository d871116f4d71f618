package main

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Turns are short and many, so that other load of the machine affects all subjects equally.
const (
	getTurn  = 300 * time.Millisecond
	listTurn = 2 // requests
)

// Names of rows.
const (
	oneGet       = "GET 1 KB, one at a time"
	manyGets     = "GET 1 KB, 32 at a time on 4 connections"
	listJSON     = "LIST 5,000, JSON"
	listProtobuf = "LIST 5,000, protobuf"
	listGzip     = "LIST 5,000, JSON, gzip"
	oneWatch     = "WATCH, 500 updates/s, 1 watch"
	manyWatches  = "WATCH, 500 updates/s, 10 watches"
)

// row is one thing to measure.
type row struct {
	name string
	unit string // of what is counted
	list bool   // bytes matter, not only how many
	run  turn
}

// turn measures one subject once. It calls begin when the measured part begins.
type turn func(ctx context.Context, s *subject, begin func() error) (sample, error)

func rows(namespace string, api *subject) []row {
	list := func(accept string, gzip bool) turn {
		r := request{path: collection(namespace), accept: accept, gzip: gzip}
		least := int64(objects * 800)
		if gzip {
			least = objects * 20
		}
		return loop{request: r, workers: 1, atMost: listTurn, least: least}.run
	}
	watch := func(n int) turn {
		return watches{namespace: namespace, count: n, writer: api.clients[0]}.run
	}
	return append(gets(namespace), []row{
		{listJSON, "request", true, list(jsonType, false)},
		{listProtobuf, "request", true, list(protobufType, false)},
		{listGzip, "request", true, list(jsonType, true)},
		{oneWatch, "event", false, watch(1)},
		{manyWatches, "event", false, watch(10)},
	}...)
}

func gets(namespace string) []row {
	get := request{path: collection(namespace) + "/" + objectName(objects-1), accept: jsonType}
	return []row{
		{oneGet, "request", false, loop{request: get, workers: 1, lasts: getTurn, least: 800}.run},
		{manyGets, "request", false, loop{request: get, workers: 32, lasts: getTurn, least: 800}.run},
	}
}

// wanted returns the rows that are to be measured.
func (o options) wanted(rows []row) ([]row, error) {
	names, err := regexp.Compile(o.rows)
	return slices.DeleteFunc(rows, func(r row) bool { return err != nil || !names.MatchString(r.name) }), err
}

// loop sends one request repeatedly: each worker sends the next after an answer.
type loop struct {
	request request
	workers int
	least   int64         // minimum size of an answer in bytes
	lasts   time.Duration // or:
	atMost  int64         // number of requests
}

func (l loop) run(ctx context.Context, s *subject, begin func() error) (sample, error) {
	if err := begin(); err != nil {
		return sample{}, err
	}
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
