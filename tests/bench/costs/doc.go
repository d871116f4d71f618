// Command costs reads what `go test -bench` printed of package bpf's Connect and
// agent/capture's Capture and Check, each run several times, from its standard
// input. It prints the medians beside what they may cost and fails if one is over.
package main
