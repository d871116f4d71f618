// Command costs reads the output of `go test -bench` from its standard input: of package
// bpf's Connect and agent/capture's Capture and Check, each run several times. It prints the
// medians and their limits, and fails if one is above its limit.
package main
