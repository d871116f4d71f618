package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ctrlmesh/ctrlmesh/tests/stats"
)

// running are the proxies that were started.
var running sync.WaitGroup

// longest bounds a whole run.
const longest = 20 * time.Minute

// bounded runs a command that measures, for at most the longest time, and waits for the
// proxies that it started. The command gets the token of a service account, from standard
// input, and a directory of its own.
func bounded(command func(ctx context.Context, o options, token, dir string) error) func(context.Context, options) error {
	return inDirectory(func(ctx context.Context, o options, dir string) error {
		token, err := io.ReadAll(os.Stdin)
		if err != nil || len(token) == 0 {
			return errors.New("no token on standard input")
		}
		return command(ctx, o, strings.TrimSpace(string(token)), dir)
	})
}

// inDirectory is bounded for a command that needs no token.
func inDirectory(command func(ctx context.Context, o options, dir string) error) func(context.Context, options) error {
	return func(ctx context.Context, o options) error {
		defer running.Wait()
		ctx, cancel := context.WithTimeout(ctx, longest)
		defer cancel()
		dir, err := os.MkdirTemp("", "ctrlmesh-bench-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		return command(ctx, o, dir)
	}
}

// run measures all proxies.
func run(ctx context.Context, o options, token, dir string) error {
	wantedSubject, err := regexp.Compile(o.subjects)
	if err != nil {
		return err
	}
	all, err := subjects(ctx, o, token, dir)
	if err != nil {
		return err
	}
	api := all[0]
	if err := seed(ctx, api, o.namespace); err != nil {
		return fmt.Errorf("making the objects: %w", err)
	}
	wanted, err := o.wanted(rows(o.namespace, api))
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(s *subject) bool { return !wantedSubject.MatchString(s.name) })
	for _, s := range all {
		if err := warm(ctx, s, o.namespace); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	results, err := measure(ctx, o.rounds, wanted, all)
	if err != nil {
		return err
	}
	report(os.Stdout, wanted, all, results, plain, nginx, haproxy, oneThread)
	return reportLimits(os.Stdout, results)
}

// warm opens all connections, and requires that a subject does its work: without a policy in
// force it would be faster.
func warm(ctx context.Context, s *subject, namespace string) error {
	for _, c := range s.clients {
		for range 20 {
			if _, err := c.do(ctx, request{path: collection(namespace) + "/" + outsider, accept: jsonType}); err != nil {
				return err
			}
		}
		if _, err := c.do(ctx, request{path: collection(namespace), accept: jsonType}); err != nil {
			return err
		}
	}
	narrows, err := narrowed(ctx, s, namespace)
	if err == nil && narrows != (s.name == ctrlmesh || s.name == hundred) {
		err = errors.New("it narrows, or does not, what it should not, or should")
	}
	return err
}

// measure lets the subjects take turns, each round in another order. The results
// are by row and subject, one sample for each round. It prints the machine and its load.
func measure(ctx context.Context, rounds int, rows []row, subjects []*subject) (map[string]map[string][]sample, error) {
	before := stats.Load()
	results := map[string]map[string][]sample{}
	for _, r := range rows {
		results[r.name] = map[string][]sample{}
	}
	for round := range rounds {
		for n, r := range rows {
			for i := range subjects {
				s := subjects[(i+n+round)%len(subjects)]
				if s.name == nginx && r.unit == "event" {
					continue // it holds back the head of a watch until there is an event
				}
				one, err := take(ctx, r, s)
				if err != nil {
					return nil, fmt.Errorf("%s: %s: %w", r.name, s.name, err)
				}
				results[r.name][s.name] = append(results[r.name][s.name], one)
			}
		}
		fmt.Fprintf(os.Stderr, "\rround %d of %d ", round+1, rounds)
	}
	fmt.Fprintln(os.Stderr)
	fmt.Printf("%s; load before: %s; after: %s\n", machine(), before, stats.Load())
	return results, nil
}

// take runs one turn of one subject, and measures the proxy's usage meanwhile.
func take(ctx context.Context, r row, s *subject) (sample, error) {
	var before time.Duration
	out, err := r.run(ctx, s, func() (err error) {
		before, err = s.cpu()
		return err
	})
	if err != nil {
		return sample{}, err
	}
	after, err := s.cpu()
	if err != nil {
		return sample{}, err
	}
	out.cpu = after - before
	out.rss, err = s.rss()
	return out, err
}
