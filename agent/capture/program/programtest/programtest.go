// Package programtest lets tests run the iptables programs with bounds, as the agent's
// image does.
package programtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
)

// Link links the bounded names of the iptables programs, and of more programs, to the
// test's binary, for the length of the test.
func Link(t testing.TB, more ...string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range append(more, "iptables", "ip6tables", "iptables-nft", "ip6tables-nft") {
		if err := os.Symlink(self, filepath.Join(dir, name+program.Suffix)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
}
