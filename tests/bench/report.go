package main

import (
	"fmt"
	"io"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// report prints a table of the results, and one of the ratios of ctrlmesh to each of some
// subjects. A ratio above one is in ctrlmesh's favour.
func report(w io.Writer, rows []row, subjects []*subject, results map[string]map[string][]sample, beside ...string) {
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format, args...) }
	p("\n| row | subject | throughput | of direct | p50 ms | p99 ms | proxy CPU | RSS MB |\n|---|---|--:|--:|--:|--:|--:|--:|\n")
	for _, r := range rows {
		name := r.name
		for _, s := range subjects {
			of := results[r.name][s.name]
			if len(of) == 0 {
				continue
			}
			p("| %s | %s | %s | %s | %.2f | %.2f | %s | %s |\n", name, s.name, r.throughput(of),
				times(metric(perSecond), of, results[r.name][direct]),
				percentile(50).of(of), percentile(99).of(of), r.cpu(s, of), rss(s, of))
			name = ""
		}
	}
	for _, name := range beside {
		if !slices.ContainsFunc(subjects, func(s *subject) bool { return s.name == name }) {
			continue
		}
		p("\n| ctrlmesh beside %s | throughput | p50 | p99 | CPU |\n|---|--:|--:|--:|--:|\n", name)
		for _, r := range rows {
			mesh, other := results[r.name][ctrlmesh], results[r.name][name]
			if len(other) == 0 {
				continue
			}
			cpu := "-"
			if name != direct {
				cpu = times(cpuEach, other, mesh)
			}
			p("| %s | %s | %s | %s | %s |\n", r.name, times(perSecond, mesh, other),
				times(percentile(50), other, mesh), times(percentile(99), other, mesh), cpu)
		}
	}
}

func (r row) throughput(of []sample) string {
	if r.list {
		return fmt.Sprintf("%.1f/s, %.0f MB/s", metric(perSecond).of(of), metric(megabytes).of(of))
	}
	return fmt.Sprintf("%.0f/s", metric(perSecond).of(of))
}

func (r row) cpu(s *subject, of []sample) string {
	switch {
	case s.pid == 0:
		return "-"
	case r.list:
		return fmt.Sprintf("%.0f us/%s, %.0f us/MB", metric(cpuEach).of(of), r.unit, metric(cpuMegabyte).of(of))
	}
	return fmt.Sprintf("%.1f us/%s", metric(cpuEach).of(of), r.unit)
}

func rss(s *subject, of []sample) string {
	if s.pid == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f", metric(memory).of(of))
}

func times(m metric, a, b []sample) string {
	if len(a) == 0 || len(b) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", m.ratio(a, b))
}

func machine() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return fmt.Sprintf("%d cores, Linux %s, %s", runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]), runtime.Version())
}
