// Package results reads what `go test -json` prints (cmd/test2json describes it), and decides
// which end-to-end tests may run once more.
package results
