// Package programtest lets tests run the iptables programs with bounds, as the agent's
// image does.
package programtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
)

// Link links the bounded names of the iptables programs, and of more programs, for the
// length of the test.
func Link(t testing.TB, more ...string) {
	t.Helper()
	file, err := build()
	if err != nil {
		t.Fatal(err)
	}
	bounded := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), file.Fd())
	dir := t.TempDir()
	for _, name := range append(more, "iptables", "ip6tables") {
		if err := os.Symlink(bounded, filepath.Join(dir, name+program.Suffix)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
}

// build builds the program of package bounded, once per test binary. That binary itself
// takes several times as long to start with the race detector. The file has no name left,
// and goes with the process.
var build = sync.OnceValues(func() (*os.File, error) {
	dir, err := os.MkdirTemp("", "bounded")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "bounded")
	command := exec.Command("go", "build", "-o", path, "github.com/ctrlmesh/ctrlmesh/agent/capture/program/programtest/bounded")
	if out, err := command.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building the bounded program: %w: %s", err, out)
	}
	return os.Open(path)
})
